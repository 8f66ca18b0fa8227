-- The node leaves for good: no other node waits for its lease to run out.
--
-- args  in_order  '1': its workers ended in a drain as all others do, and none was killed
-- Outcome: ok
redis.call('SADD', key('gone'), node)
redis.call('PEXPIRE', key('gone'), J.ttl_ms)
local row = forget(node)
if J.state ~= 'ended' then
  if row and redis.call('SREM', completed, node) == 0 then
    local cause = 'node ' .. host_of(row) .. ' left'
    if J.change ~= '' and args.in_order == '1' then
      change(cause)
    else
      change_unannounced(cause)
    end
    -- Members whose workers have succeeded take part again: the leaving node's work is still to be
    -- done.
    if J.drain == '' or redis.call('SCARD', completed) > 0 then
      over(cause)
    end
  end
  try_success()
  try_round()
end
return reply('ok')
