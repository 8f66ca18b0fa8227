-- The common beginning of every transition. A script is this text, the fast path of join or
-- heartbeat, permissions.lua, membership.lua, budget.lua, seats.lua, leases.lua and its own file.
-- Before join.lua stands instances.lua.
--
-- KEYS  1 job       hash: the job's own fields; see docs/rendezvous-protocol.md
--       2 leases    sorted set: node -> the server's time in ms at which it counts as lost
--       The job's other keys differ from these in their last word only, so that they live in the
--       same slot; they are named in membership.lua and below.
-- args  node
--       token        of the job
--       seen_generation, seen_nonce, seen_restarts   the highest generation and restart count that
--                    the node has seen
--       generation, nonce   the generation that this request is about
--       row          the node's own row in that generation, or ''
--       next_nonce   the nonce of the next generation, used if this call starts it
--       The table in rendezvous_scripts.cc names the arguments of every script.
-- Every reply is {outcome, generation, nonce, restarts, ...}. Outcomes of all transitions:
--       unknown   the job does not exist: the server has lost its memory. Open the job again
--       foreign   another job has this number. Open again too: the job may have another number
local job_key, leases = KEYS[1], KEYS[2]
local node, token = args.node, args.token
local my_generation, my_nonce = args.generation, args.nonce

local server_time = redis.call('TIME')
local now = server_time[1] * 1000 + math.floor(server_time[2] / 1000)

local brief = redis.call('HMGET', job_key, 'token', 'state', 'generation', 'nonce', 'restarts',
  'lease_ms', 'tick', 'max_step', 'median', 'drain', 'drain_stop', 'over', 'unknown', 'at_work')
if brief[1] ~= token then
  return {brief[1] and 'foreign' or 'unknown', '0', '', '0'}
end

-- Returns since when, by the server's time in ms, a rank of the present generation has been at work
-- without a step, its node, and "rank phase host"; or nil. The field is "generation since node\n"
-- and that text.
local function at_work(field, generation)
  local of, since, name, text = string.match(field or '', '^(%d+) (%d+) ([^\n]*)\n([^\n]*)$')
  if of == generation then
    return tonumber(since), name, text
  end
end

local function at_work_reply(field, generation)
  local since, _, text = at_work(field, generation)
  return since and string.format('%.0f %s', math.max(0, now - since), text) or ''
end
