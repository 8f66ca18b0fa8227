-- Reports a failed worker. The first report ends the generation; later ones may name the root
-- cause.
--
-- ARGV  10 rank, 11 host, 12 cause, 13 whether it is a victim (1 or 0), 14 highest step or -1
--       15 whether steps are known (1 or 0), 16 exit code
--       17 the rank that this host has reported before and that failed later, or -1
--       18 time in ms in a drain before workers are killed, where this worker stops by itself at a
--          common step, and had got no signal; else 0
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
local is_victim = ARGV[13]
if J.change ~= '' and (tonumber(ARGV[14]) >= num('drain_stop') or
  now - num('drain_at') >= tonumber(ARGV[18])) then
  is_victim = '1'
end
note_failure(ARGV[10], ARGV[11], ARGV[12], is_victim, ARGV[14], ARGV[15], ARGV[16], ARGV[17])
over(ARGV[12])
if is_charged() and num('unknown') == 0 and redis.call('HLEN', members) == 1 and
  redis.call('HLEN', joined) == 0 and verdict() then
  -- No other node can turn out to be lost or can go on, so the job ends at once.
  settle(true)
  return ended_reply()
end
set('reported_at', text(now))
return reply('restart')
