-- Puts bytes behind a value, a missing one counting as empty, and wakes those who wait for it.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  what the names of the keys' channels begin with
-- ARGV[3]  key
-- ARGV[4]  bytes to append
--
-- What the server's rules for this user may refuse comes before the value is changed, or is HSET
-- itself.
local current = redis.call('HGET', KEYS[1], ARGV[3]) or ''
local has_expiry = redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
redis.call('HSET', KEYS[1], ARGV[3], current .. ARGV[4])
if has_expiry == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
