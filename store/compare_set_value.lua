-- Replaces a value if it is the expected one. A missing value is as good as expected when the
-- expected one is empty. Returns what the key has afterwards; where it has nothing, the expected
-- value.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  what the names of the keys' channels begin with
-- ARGV[3]  key
-- ARGV[4]  expected value
-- ARGV[5]  desired value
--
-- What the server's rules for this user may refuse comes before the value is changed, or is HSET
-- itself.
local current = redis.call('HGET', KEYS[1], ARGV[3])
if not current and ARGV[4] ~= '' then
  return ARGV[4]
end
if current and current ~= ARGV[4] then
  return current
end
local has_expiry = redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
redis.call('HSET', KEYS[1], ARGV[3], ARGV[5])
if has_expiry == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return ARGV[5]
