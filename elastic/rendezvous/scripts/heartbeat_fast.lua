-- Fast path of a heartbeat that requires no decision, which is nearly every one: four commands.
-- Every other case falls through to heartbeat.lua.
--
-- Arguments, outcomes: see heartbeat.lua
-- After the server lost its memory (`unknown` is not 0) every member must send one heartbeat by the
-- slow path: its lease may exist while its membership does not. Permissions are checked before the
-- lease is renewed.
if brief[2] ~= 'ended' and brief[3] == my_generation and brief[4] == my_nonce and
  brief[13] == '0' and args.busy_us == '' and args.report == '' and args.max_world == '' and
  args.at_work == '' and (args.completed == '' or
  redis.call('SISMEMBER', string.sub(job_key, 1, -4) .. 'completed', node) == 1) then
  local since_tick = now - tonumber(brief[7])
  local may = redis.acl_check_cmd
  local is_allowed = not may or may('HSET', job_key, 'max_step', args.step)
  if since_tick >= 0 and since_tick * 12 < tonumber(brief[6]) and is_allowed and
    redis.call('ZADD', leases, string.format('%.0f', now + brief[6]), node) == 0 then
    if brief[2] == 'forming' then
      return {'over', brief[3], brief[4], brief[5], brief[12]}
    end
    if tonumber(args.step) > tonumber(brief[8]) then
      redis.call('HSET', job_key, 'max_step', args.step, 'rate', args.rate,
        brief[8] == '-1' and 'first_step' or 'max_step', args.step)
    end
    if brief[10] ~= '' then
      return {'drain', brief[3], brief[4], brief[5], brief[11], brief[10]}
    end
    return {'ok', brief[3], brief[4], brief[5], brief[9], '', at_work_reply(brief[14], brief[3])}
  end
end
