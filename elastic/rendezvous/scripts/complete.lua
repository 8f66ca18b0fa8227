-- All workers of the node have succeeded. With the last member of the generation the job succeeds.
--
-- Outcomes: ok
--           stale: the generation is over, or the node is not in it
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
