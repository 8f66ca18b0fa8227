-- Appends bytes to a value and wakes its waiters. A missing value counts as empty.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  prefix of the names of the keys' channels
-- ARGV[3]  key
-- ARGV[4]  bytes to append
--
-- Each command that the server's access rules may refuse runs before the value is changed, or is
-- HSET itself. So a refused script changes nothing.
local current = redis.call('HGET', KEYS[1], ARGV[3]) or ''
local has_expiry = redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
redis.call('HSET', KEYS[1], ARGV[3], current .. ARGV[4])
if has_expiry == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
