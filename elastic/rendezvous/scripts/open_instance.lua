-- A new instance of a run id, so that nothing of an earlier job under the same id is ever seen; or
-- the token of one that is open. Stands alone, without the prelude.
--
-- KEYS  1 the counter of instances, 2 what this request got (it may be sent again)
-- ARGV  1 what the keys of the run begin with, 2 the wanted instance, 0 for a new one
--       3 the token of the new instance, 4 time to live of the keys in ms, 5 of the request in ms
-- Reply: {instance, token}; the token is '' where the wanted instance does not exist.
local function job_of(instance)
  return ARGV[1] .. 'i' .. instance .. ':job'
end

if ARGV[2] ~= '0' then
  return {ARGV[2], redis.call('HGET', job_of(ARGV[2]), 'token') or ''}
end
local given = redis.call('GET', KEYS[2])
if not given then
  -- A server that lost the counter may still know, or know again, instances beyond it.
  for _ = 1, 1000 do
    given = string.format('%.0f', redis.call('INCR', KEYS[1]))
    if redis.call('EXISTS', job_of(given)) == 0 then
      break
    end
  end
  redis.call('HSET', job_of(given), 'token', ARGV[3])
  redis.call('PEXPIRE', job_of(given), ARGV[4])
  redis.call('SET', KEYS[2], given, 'PX', ARGV[5])
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {given, ARGV[3]}
