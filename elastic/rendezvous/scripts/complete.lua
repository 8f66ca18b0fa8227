-- All workers of a node have succeeded; with the last node of the round, so has the job.
--
-- ARGV  9 generation, 10 its nonce
-- Outcomes: stale
--           ok + state
local is_current = tonumber(ARGV[9]) == generation and ARGV[10] == nonce
if not is_current or state == 'forming' or state == 'failed' then
  return reply('stale')
end
renew_lease()
redis.call('SADD', completed, node)
-- An adopted generation has lost its members: then nobody is known to be missing.
if redis.call('SCARD', completed) >= redis.call('HLEN', members) then
  set_state('succeeded')
end
return reply('ok', state)
