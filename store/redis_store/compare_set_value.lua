-- Replaces a value if it equals the expected value. A missing value counts as equal to an empty
-- expected value. Returns the key's value after the call, or the expected value where there is
-- none.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  prefix of the names of the keys' channels
-- ARGV[3]  key
-- ARGV[4]  expected value
-- ARGV[5]  desired value
--
-- Each command that the server's access rules may refuse runs before the value is changed, or is
-- HSET itself. So a refused script changes nothing.
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
