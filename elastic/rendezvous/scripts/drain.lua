-- The node will leave: all nodes stop at a common step. That is not charged.
--
-- args  cause
-- Outcomes: drain + the step to stop after + cause
--           stale: the generation is over, or the node is not in it
--           ended + kind + exit code + reason; reopen
if J.state == 'ended' then
  return ended_reply()
end
if not is_current or not my_members_row or J.state ~= 'running' then
  return reply('stale')
end
redis.call('ZADD', leases, text(now + lease_ms), node)
start_drain(args.cause)
return reply('drain', J.drain_stop, J.drain)
