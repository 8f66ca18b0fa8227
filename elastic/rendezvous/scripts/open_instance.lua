-- A new instance of a run id, so that nothing of an earlier job under the same id is ever seen.
-- Stands alone, without the prelude.
--
-- KEYS  1 the counter of instances, 2 what this request got (it may be sent again)
-- ARGV  1 time to live of the counter in ms, 2 of the request in ms
-- Reply: the instance, from 1.
local given = redis.call('GET', KEYS[2])
if not given then
  given = redis.call('INCR', KEYS[1])
  redis.call('SET', KEYS[2], given, 'PX', ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return tostring(given)
