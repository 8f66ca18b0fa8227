-- Puts an element at the end of a queue and wakes those who wait for one.
--
-- KEYS[1]  the queue
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  the channel of the queue's key
-- ARGV[3]  element
local length = redis.call('RPUSH', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2], '')
return length
