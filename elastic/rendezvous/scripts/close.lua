-- Ends the job for all nodes.
--
-- ARGV  10 kind, 11 exit code, 12 reason
-- Outcome: ended + kind + exit code + reason, of the first end of the job
if J.state ~= 'ended' then
  end_job(ARGV[10], ARGV[11], ARGV[12])
end
return ended_reply()
