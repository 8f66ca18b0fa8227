-- A member says that it lives and how far it is, and learns what it may have missed.
--
-- ARGV  10 highest step, -1 for none; 11 steps per second; 12 us of own work per step, 13 its row
--       for people: both only when they have changed, else ''; 14 '1': light heartbeats follow;
--       15 '1': its workers have all succeeded, and the server has been told; it may have forgotten
-- Outcomes: ok + the job's median of ARGV 12 + '1' where the clock's transitions were due, so that
--                few nodes are heard in full + when the lease ends, by the server's clock
--           drain + the step to stop after + why
--           over + why        the generation is over
--           evicted + why     the node is no member
--           ended + kind + exit code + reason; reopen
if J.state == 'ended' then
  return ended_reply()
end
if not is_current or not my_members_row then
  -- A member of the current generation that does not know of it yet is lost, not forgotten, should
  -- it never come.
  if not my_members_row and redis.call('HEXISTS', joined, node) == 0 then
    redis.call('ZREM', leases, node)
  end
  return reply('evicted', is_current and 'its lease ran out' or
    'generation ' .. J.generation .. ' has begun without it')
end
local lease_end = text(now + lease_ms)
redis.call('ZADD', leases, lease_end, node)
if ARGV[14] == '1' then
  redis.call('SET', beat_key(node), '1', 'PX', lease_ms)
end
if J.state == 'forming' then
  return reply('over', J.over)
end
if ARGV[15] == '1' and redis.call('HEXISTS', joined, node) == 0 and
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
if tonumber(ARGV[10]) > num('max_step') then
  set('max_step', ARGV[10], 'rate', ARGV[11])
end
if ARGV[12] ~= '' then
  redis.call('ZADD', busy, ARGV[12], node)
  redis.call('PEXPIRE', busy, J.ttl_ms)
end
if ARGV[13] ~= '' then
  redis.call('HSET', rows, node, ARGV[13])
  redis.call('PEXPIRE', rows, J.ttl_ms)
end
if J.drain ~= '' then
  return reply('drain', J.drain_stop, J.drain)
end
return reply('ok', J.median, has_ticked and '1' or '', lease_end)
