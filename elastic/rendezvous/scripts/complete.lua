-- All workers of a node have succeeded; with the last node of the round, so has the job.
--
-- ARGV  7 generation, 8 its nonce
-- Outcomes: stale
--           ok + state
if tonumber(ARGV[7]) ~= generation or ARGV[8] ~= nonce or state == 'forming' or state == 'failed' then
  return reply('stale')
end
renew_lease()
redis.call('SADD', completed, node)
-- An adopted generation has lost its members: then nobody is known to be missing.
if redis.call('SCARD', completed) >= redis.call('HLEN', members) then
  set_state('succeeded')
end
return reply('ok', state)
