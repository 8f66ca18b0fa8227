-- Ends the job for all nodes.
--
-- args  kind, exit_code, reason
-- Outcome: ended + kind + exit code + reason, of the first end of the job
if J.state ~= 'ended' then
  end_job(args.kind, args.exit_code, args.reason)
end
return ended_reply()
