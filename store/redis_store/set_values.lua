-- Sets values and wakes their waiters.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  prefix of the names of the keys' channels
-- ARGV[3]  key, ARGV[4] its value, and so on
--
-- Each command that the server's access rules may refuse runs before a value is set, or is the
-- first HSET itself. So a refused script changes nothing.
local has_expiry = redis.call('PEXPIRE', KEYS[1], ARGV[1])
for i = 3, #ARGV, 2 do
  redis.call('PUBLISH', ARGV[2] .. ARGV[i], '')
end
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if has_expiry == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return #ARGV / 2 - 1
