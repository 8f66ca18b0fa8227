-- Offers the node for the next round. A waiting node repeats the call to renew its lease.
-- args.generation and args.row name the last round that the node was in.
--
-- args  offer         "nproc port wanted_rank\nrole\nhost\naddress"
--       only_changes  '1': a repeated call that asks only for changes
--       program       "hash text" of the node's program; '' for any
-- Outcomes: round + the node's row + why the last generation was over + whether that was charged
--           waiting + the condition + number of waiting nodes + ms after which to call again, or 0
--           spare + the same: the job runs, and the wait has no time limit
--           same: nothing has changed
--           reopen: the instance was given up, or is a full job without an id: open another one
--           refused + the program of the job's nodes with this role: the node's own differs
--           ended + kind + exit code + reason
local offer = args.offer
local host = host_of(offer)

local store_was_away =
  'the store was away, and membership is decided once all nodes have had time to come back'

local function waiting_for()
  local present = redis.call('HLEN', joined)
  local missing = redis.call('SCARD', awaited) + num('unknown')
  local last_call = J.generation == '0' and num('last_call_at') > 0
  local wanted = num(last_call and 'max_nodes' or 'min_nodes')
  if J.generation == '0' or missing == 0 then
    if present < wanted then
      return string.format('only %d of %d nodes have joined', present, wanted)
    end
    return held_ms > 0 and string.format(
      'the job is about to end (%s): no node has turned out to be lost', J.fail_cause) or
      store_was_away
  end
  local names = {}
  if missing <= 3 then
    for _, name in ipairs(redis.call('SMEMBERS', awaited)) do
      names[#names + 1] = host_of(redis.call('HGET', members, name) or '')
    end
    table.sort(names)
  end
  if missing == 1 and names[1] then
    return 'node ' .. names[1] .. ' has not come back'
  end
  return string.format('%d nodes have not come back%s', missing,
    #names > 0 and ': ' .. table.concat(names, ', ') or '')
end

local function enter()
  local earlier = redis.call('HGET', joined, node)
  local arrival = earlier and string.match(earlier, '^%d+') or text(now)
  redis.call('HSET', joined, node, arrival .. ' ' .. offer)
  if not earlier and J.state == 'running' and not my_members_row then
    set('newcomer_at', text(now))
    if num('newcomers_since') == 0 then
      set('newcomers_since', text(now))
    end
  end
  redis.call('SREM', awaited, node)
  redis.call('SREM', completed, node)
  redis.call('ZADD', leases, text(now + lease_ms), node)
  redis.call('PEXPIRE', joined, J.ttl_ms)
  redis.call('PEXPIRE', leases, J.ttl_ms)
end

local function has_other_machines()
  local all = redis.call('HGETALL', members)
  for i = 2, #all, 2 do
    if host_of(all[i]) ~= host then return true end
  end
  return false
end

-- Returns why a running generation takes no newcomer now, or nil.
local function kept_out()
  if redis.call('HLEN', members) >= num('max_nodes') then
    return num('max_nodes') == 1 and 'as a spare: the only seat is taken' or
      string.format('as a spare: all %s seats are taken', J.max_nodes)
  end
  if num('unknown') > 0 or is_frozen() then
    return store_was_away
  end
  if redis.call('SCARD', completed) > 0 then
    return 'as a spare: nodes of the job have finished already'
  end
  if is_quarantined(host) and has_other_machines() then
    return 'as a spare: ' .. host .. ' is in quarantine after repeated failures or losses'
  end
  local limit, nproc = num('max_world'), tonumber(string.match(offer, '^%d+'))
  if limit > 0 and num('world_size') + nproc > limit then
    return string.format('as a spare: the program takes at most %d workers, %s work, and this' ..
      ' node offers %d', limit, J.world_size, nproc)
  end
  if redis.call('HLEN', joined) < num('node_unit') then
    return 'as a spare: nodes take part in multiples of ' .. J.node_unit .. ' (--node-unit)'
  end
end

-- Returns why nodes that the running generation will take in still wait.
local function gathers()
  if made_steps_since_drain() then
    return string.format('new nodes join together, %g s after the last one (--scale-up-delay)',
      num('scale_up_delay_ms') / 1000)
  end
  return string.format('new nodes join when the job has made %d steps since its last change',
    steps_between_drains)
end

-- True where this node waits alone for a job to begin, and an older job of the same fingerprint has
-- a free seat. The older job was full when this one was opened.
local function has_a_better_place()
  if J.generation ~= '0' or J.fingerprint == '' or
    redis.call('HLEN', joined) > redis.call('HEXISTS', joined, node) then
    return false
  end
  local prefix, own = string.match(job_key, '^(.*:)i(%d+):job$')
  for _, found in ipairs(open_jobs(prefix, J.fingerprint)) do
    if tonumber(found[1]) < tonumber(own) and not is_deserted(found[2], now) and
      not is_full(found[2]) then
      return true
    end
  end
  return false
end

-- A job without an id has no spares. More agents than it has seats may have opened it at the same
-- time. A node that finds all seats taken opens another job.
local function is_one_too_many()
  if J.fingerprint == '' or my_members_row then
    return false
  end
  if redis.call('HEXISTS', joined, node) == 0 then
    return is_full(look_at_job(string.match(job_key, '^(.*:)i(%d+):job$')))
  end
  -- The node joined a job that was made again, before its members told of its generation.
  return J.adopted == '1' and J.state == 'running' and
    redis.call('SCARD', awaited) + num('unknown') >= num('max_nodes')
end

if J.state == 'ended' then
  return ended_reply()
end
if has_a_better_place() then
  end_job('abandoned', '0', 'its only node has gone to an older job')
  return ended_reply()
end
if redis.call('SISMEMBER', key('gone'), node) == 1 then
  return reply('ended', 'closed', '0', 'this node has left')
end
if is_one_too_many() then
  forget(node)
  return reply('reopen')
end
-- Nodes of one role run one program: two jobs may have been given one run id. Nodes without an id
-- meet by their program anyway.
local function other_program()
  local field = 'program:' .. string.match(offer, '\n([^\n]*)\n')
  if args.program == '' or J.fingerprint ~= '' or J[field] == args.program then
    return nil
  end
  if not J[field] then
    set(field, args.program)
    return nil
  end
  return J[field]
end

local other = other_program()
if other then
  return reply('refused', other)
end
-- The reply with the node's row was lost. A node that has seen another generation of this number,
-- which the server forgot, never gets a row under this number.
local is_new_to_it = num('generation') > tonumber(args.seen_generation)
if my_members_row and is_new_to_it then
  redis.call('ZADD', leases, text(now + lease_ms), node)
  return reply('round', my_members_row, J.reason, J.charged)
end

enter()
if J.state == 'running' and J.drain == '' then
  if my_members_row then
    -- The member's workers have stopped, without a report.
    local cause = 'node ' .. host .. ' starts again'
    change_unannounced(cause)
    over(cause)
  else
    try_scale_up()
  end
end
try_round()

if J.state == 'ended' then
  return ended_reply()
end
local row = redis.call('HGET', members, node)
if row and num('generation') > tonumber(args.seen_generation) then
  return reply('round', row, J.reason, J.charged)
end
local how_many_wait = text(redis.call('HLEN', joined))
if J.state == 'running' and J.drain == '' then
  return reply('spare', kept_out() or gathers(), how_many_wait)
end
return reply('waiting', waiting_for(), how_many_wait, text(held_ms))
