-- A node will leave: all stop at a common step, free of charge.
--
-- ARGV  10 why
-- Outcomes: drain + the step to stop after + why
--           stale: the generation is over, or none of this node's
--           ended + kind + exit code + reason; reopen
if J.state == 'ended' then
  return ended_reply()
end
if not is_current or not my_members_row or J.state ~= 'running' then
  return reply('stale')
end
redis.call('ZADD', leases, text(now + lease_ms), node)
start_drain(ARGV[10])
return reply('drain', J.drain_stop, J.drain)
