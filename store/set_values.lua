-- Sets values and wakes those who wait for them.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  what the names of the keys' channels begin with
-- ARGV[3]  key, ARGV[4] its value, and so on
--
-- What the server's rules for this user may refuse comes before a value is set, or is the first
-- HSET itself.
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
