-- The node is lost: it goes down with its agent, and its last failure report was of that. Gives
-- back the charge of the report. args.generation and args.nonce: the generation of the report; the
-- next one may have begun.
--
-- Outcomes: ok; ended + kind + exit code + reason: too late
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
