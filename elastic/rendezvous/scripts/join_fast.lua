-- Fast path of a repeated join when nothing has changed. Every other case falls through to
-- join.lua.
--
-- Arguments, outcomes: see join.lua
if args.only_changes == '1' and brief[2] ~= 'ended' and brief[3] == args.seen_generation and
  brief[4] == args.seen_nonce then
  local since_tick = now - tonumber(brief[7])
  if since_tick >= 0 and since_tick * 12 < tonumber(brief[6]) and
    redis.call('HEXISTS', string.sub(job_key, 1, -4) .. 'joined', node) == 1 and
    redis.call('ZADD', leases, string.format('%.0f', now + brief[6]), node) == 0 then
    return {'same', brief[3], brief[4], brief[5]}
  end
end
