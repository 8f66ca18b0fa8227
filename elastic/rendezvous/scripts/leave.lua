-- A node goes for good: nobody needs to wait for its lease to run out.
--
-- Outcome: ok
redis.call('ZREM', leases, node)
redis.call('HDEL', joined, node)
return reply('ok')
