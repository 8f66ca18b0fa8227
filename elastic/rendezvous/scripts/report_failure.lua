-- Reports a failed worker. The first report ends the generation; later ones may name the root
-- cause.
--
-- args  rank, host, cause, exit_code
--       is_victim       '1' or '0'
--       step            the highest step, or -1
--       progress_known  whether steps are known: '1' or '0'
--       instead_of      the rank that this host has reported before and that failed later, or -1
--       grace_ms        time in a drain before workers are killed, where this worker stops by
--                       itself at a common step, and had got no signal; else 0
-- Outcomes: restart: join again
--           stale: the generation is no longer the node's current one
--           ended + kind + exit code + reason; reopen
if J.state == 'ended' then
  return ended_reply()
end
if not is_current or not my_members_row then
  return reply('stale')
end
redis.call('ZADD', leases, text(now + lease_ms), node)
-- In a drain a worker may fail because it got a signal, or because its peers have stopped or were
-- killed.
local is_victim = args.is_victim
if J.change ~= '' and (tonumber(args.step) >= num('drain_stop') or
  now - num('drain_at') >= tonumber(args.grace_ms)) then
  is_victim = '1'
end
note_failure(is_victim)
over(args.cause)
if is_charged() and num('unknown') == 0 and redis.call('HLEN', members) == 1 and
  redis.call('HLEN', joined) == 0 and verdict() then
  -- No other node can turn out to be lost or can go on, so the job ends at once.
  conclude(true)
  return ended_reply()
end
set('reported_at', text(now))
return reply('restart')
