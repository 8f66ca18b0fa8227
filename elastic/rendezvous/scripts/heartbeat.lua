-- A member's heartbeat: renews its lease, reports its progress, and returns anything that it may
-- have missed.
--
-- args  step       the highest step, -1 for none
--       rate       steps per second
--       busy_us    own work per step, '' where unchanged
--       report     the node's row for people, '' where unchanged
--       max_world  most workers that the program accepts, '' where unchanged or unknown
--       completed  '1': the node's workers have all succeeded, repeated in case the server forgot
--                  it; else ''
--       at_work    "ms rank phase" of the node's rank that has been at work for longest without a
--                  step; '-' where none is any more, '' where nothing is said
-- Outcomes: ok + the job's median of busy_us + a warning or '' + "ms rank phase host" of the job's
--             rank that has been at work for longest, or ''
--           drain + the step to stop after + cause
--           over + cause      the generation is over
--           evicted + cause   the node is not a member
--           ended + kind + exit code + reason; reopen
if J.state == 'ended' then
  return ended_reply()
end
if not is_current or not my_members_row then
  -- A member that has not seen the new round keeps its seat until its lease expires. Any other node
  -- that does not wait to join gives up its lease.
  if not my_members_row and redis.call('HEXISTS', joined, node) == 0 then
    redis.call('ZREM', leases, node)
  end
  return reply('evicted', is_current and 'its lease ran out' or
    'generation ' .. J.generation .. ' has begun without it')
end
redis.call('ZADD', leases, text(now + lease_ms), node)
if J.state == 'forming' then
  return reply('over', J.over)
end
if args.completed == '1' and redis.call('HEXISTS', joined, node) == 0 and
  redis.call('SADD', completed, node) == 1 then
  try_success()
  try_round()
  if J.state == 'ended' then
    return ended_reply()
  end
  if J.state == 'forming' then
    return reply('over', J.over)
  end
end
if tonumber(args.step) > num('max_step') then
  if num('max_step') < 0 then
    set('first_step', args.step)
  end
  set('max_step', args.step, 'rate', args.rate)
end
if args.busy_us ~= '' then
  redis.call('ZADD', busy, args.busy_us, node)
  redis.call('PEXPIRE', busy, J.ttl_ms)
end
if args.report ~= '' then
  redis.call('HSET', rows, node, args.report)
  redis.call('PEXPIRE', rows, J.ttl_ms)
end
if args.max_world ~= '' then
  set('max_world', args.max_world)
end
-- One rank of the job is kept. The nodes whose ranks work say so repeatedly.
if args.at_work ~= '' then
  local since, name = at_work(J.at_work, J.generation)
  local ms, what = string.match(args.at_work, '^(%d+) (.*)$')
  if not ms then
    if name == node then set('at_work', '') end
  elseif name == node or not since or now - ms < since or
    redis.call('HEXISTS', members, name) == 0 then
    set('at_work', string.format('%s %.0f %s\n%s %s', J.generation, now - ms, node, what,
      host_of(my_members_row)))
  end
end
if J.drain ~= '' then
  return reply('drain', J.drain_stop, J.drain)
end
return reply('ok', J.median, is_mended and
  'Redis has evicted a key of this job, which was made again: set its maxmemory-policy to' ..
  ' noeviction' or '', at_work_reply(J.at_work, J.generation))
