-- What every transition of the rendezvous begins with; the other scripts are appended to it.
--
-- KEYS  1 job        hash: token, state, generation, nonce, restarts, max_restarts, decided_for,
--                    decision, root_cause
--       2 leases     sorted set: node -> the server's time in ms at which it counts as dead
--       3 joined     hash: node -> offer, of the nodes that wait for the next round
--       4 members    hash: node -> offer, of the current round
--       5 ranks      hash: node -> group rank, of the current round
--       6 completed  set: the members whose workers have all succeeded
--       7 failures   hash: rank -> the server's time in ms and the cause, of the current generation
--       8 instance   the highest instance of the run id that was ever opened
-- ARGV  1 node, 2 lease in ms, 3 time to live of the keys in ms
--       4 the highest generation that the node has seen, 5 its nonce, 6 the restarts it has seen
--       7 the instance, 8 its token
-- Every reply is {outcome, generation, nonce, restarts, ...}. The outcome `foreign`: the server has
-- lost its memory, and another job was given our instance before we came to claim it again.
local job, leases, joined, members = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ranks, completed, failures, instance_counter = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local node, lease_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local seen_generation, seen_nonce, seen_restarts = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local instance, token = ARGV[7], ARGV[8]

local server_time = redis.call('TIME')
local now_ms = server_time[1] * 1000 + math.floor(server_time[2] / 1000)

local function text(number)
  return string.format('%.0f', number)
end

local state = redis.call('HGET', job, 'state') or 'forming'
local generation = tonumber(redis.call('HGET', job, 'generation') or '0')
local nonce = redis.call('HGET', job, 'nonce') or ''
local restarts = tonumber(redis.call('HGET', job, 'restarts') or '0')

redis.call('HSETNX', job, 'token', token)
if redis.call('HGET', job, 'token') ~= token then
  return {'foreign', text(generation), nonce, text(restarts)}
end

-- A server that lost its memory, in whole or the last writes of it, learns from its clients: a
-- generation never goes back, and a restart that was charged stays charged.
if seen_generation > generation then
  generation, nonce, state = seen_generation, seen_nonce, 'running'
  redis.call('HSET', job, 'state', state, 'generation', text(generation), 'nonce', nonce)
  redis.call('DEL', members, ranks, completed, failures)
end
if seen_restarts > restarts then
  restarts = seen_restarts
  redis.call('HSET', job, 'restarts', text(restarts))
end

if tonumber(redis.call('GET', instance_counter) or '0') < tonumber(instance) then
  redis.call('SET', instance_counter, instance)
end

local function set_state(new_state)
  state = new_state
  redis.call('HSET', job, 'state', state)
end

local function renew_lease()
  redis.call('ZADD', leases, text(now_ms + lease_ms), node)
end

local function reply(outcome, ...)
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, ttl_ms)
  end
  return {outcome, text(generation), nonce, text(restarts), ...}
end

