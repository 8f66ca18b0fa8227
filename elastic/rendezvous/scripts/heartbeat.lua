-- A node says that it lives, and learns which generation is the current one.
--
-- Outcome: ok + state
renew_lease()
return reply('ok', state)
