-- All workers of a node have succeeded; with the last member of the generation, so has the job.
--
-- Outcomes: ok, drain + step + why (as in heartbeat.lua)
--           stale: the generation is over, or none of this node's
--           ended + kind + exit code + reason; reopen
if J.state == 'ended' then
  return ended_reply()
end
if not is_current or not my_members_row or J.state ~= 'running' then
  return reply('stale')
end
redis.call('ZADD', leases, text(now + lease_ms), node)
if redis.call('HEXISTS', joined, node) == 0 then
  redis.call('SADD', completed, node)
end
try_success()
try_round()
if J.state == 'ended' then
  return ended_reply()
end
if J.state == 'forming' then
  return reply('stale')
end
return reply('ok')
