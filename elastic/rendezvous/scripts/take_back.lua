-- A node goes down with its agent, and the failure that the agent has just reported was that: the
-- node is lost, and what its report was charged is given back. ARGV 6 and 7: the generation of the
-- report, which may be over by one.
--
-- Outcomes: ok; ended + kind + exit code + reason: it comes too late
--           reopen
redis.call('SADD', key('gone'), node)
redis.call('PEXPIRE', key('gone'), J.ttl_ms)
if J.state == 'ended' then
  return ended_reply()
end
give_back(my_generation, my_nonce)
local row = forget(node)
if row then
  miss(node, row, 'was lost')
end
try_success()
try_round()
return reply('ok')
