-- Adds to a number and wakes those who wait for it. Returns the sum, as text: a number of Lua is a
-- double, which cannot hold every 64-bit integer.
--
-- KEYS[1]  the store's values
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  what the names of the keys' channels begin with
-- ARGV[3]  key
-- ARGV[4]  what to add
redis.call('HINCRBY', KEYS[1], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
return redis.call('HGET', KEYS[1], ARGV[3])
