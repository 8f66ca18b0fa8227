-- A worker has failed. The first report of a generation decides, and charges the budget; the others
-- get the same answer.
--
-- ARGV  9 generation, 10 its nonce, 11 rank, 12 cause, 13 the restarts that the job may spend
-- Outcomes: stale
--           restart | fail + the cause of the generation's first failure
local failed_generation, failed_nonce = tonumber(ARGV[9]), ARGV[10]
local rank, cause = ARGV[11], ARGV[12]

if failed_generation ~= generation or failed_nonce ~= nonce then
  return reply('stale')
end
renew_lease()
redis.call('HSETNX', failures, rank, text(now_ms) .. ' ' .. cause)

local fence = text(generation) .. '.' .. nonce
if redis.call('HGET', job, 'decided_for') ~= fence then
  local max_restarts = tonumber(redis.call('HGET', job, 'max_restarts') or ARGV[13])
  local decision = 'fail'
  if restarts < max_restarts then
    decision = 'restart'
    restarts = restarts + 1
  end
  redis.call('HSET', job, 'decided_for', fence, 'decision', decision, 'root_cause', cause,
    'restarts', text(restarts))
  set_state(decision == 'restart' and 'forming' or 'failed')
end
return reply(redis.call('HGET', job, 'decision'), redis.call('HGET', job, 'root_cause'))
