-- Sets values and wakes those who wait for them.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  what the names of the keys' channels begin with
-- ARGV[3]  key, ARGV[4] its value, and so on
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
for i = 3, #ARGV, 2 do
  redis.call('PUBLISH', ARGV[2] .. ARGV[i], '')
end
return #ARGV / 2 - 1
