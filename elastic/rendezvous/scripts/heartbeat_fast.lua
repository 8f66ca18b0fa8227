-- The heartbeat of a member in a generation where nothing happens, which is nearly every one: four
-- commands. Whatever is out of the ordinary falls through to heartbeat.lua.
--
-- ARGV  see heartbeat.lua
if brief[2] == 'running' and brief[3] == my_generation and brief[4] == my_nonce and brief[10] == ''
  and ARGV[12] == '' and ARGV[13] == '' then
  local since_tick = now - tonumber(brief[7])
  if since_tick >= 0 and since_tick * 12 < tonumber(brief[6]) and
    redis.call('ZADD', leases, string.format('%.0f', now + brief[6]), node) == 0 then
    if tonumber(ARGV[10]) > tonumber(brief[8]) then
      redis.call('HSET', job_key, 'max_step', ARGV[10], 'rate', ARGV[11])
    end
    return {'ok', brief[3], brief[4], brief[5], brief[9]}
  end
end
