-- Queries about the jobs of one run id, for open_instance.lua and join.lua. `prefix`: the common
-- prefix of the run's keys. `now`: the server's time in ms.

-- Number of newest instances that are considered.
local instances_max = 32

local function look_at_job(prefix, instance)
  local job_key = prefix .. 'i' .. instance .. ':job'
  local found = redis.call('HMGET', job_key, 'fingerprint', 'state', 'generation', 'opened',
    'lease_ms', 'max_nodes', 'unknown')
  return {key = job_key, base = prefix .. 'i' .. instance .. ':', fingerprint = found[1],
    state = found[2], generation = found[3], opened = found[4], lease_ms = found[5],
    max_nodes = found[6], unknown = found[7]}
end

-- True where the job has not begun and all of its nodes are gone. The members of a job that has
-- begun decide about it themselves.
local function is_deserted(job, now)
  if job.generation ~= '0' then
    return false
  end
  local freshest = redis.call('ZREVRANGE', job.base .. 'leases', 0, 0, 'WITHSCORES')
  local alive_until = tonumber(freshest[2] or job.opened) + (freshest[2] and 0 or job.lease_ms)
  return tonumber(now) > alive_until
end

-- True where waiting nodes, and members that do not wait yet, take all seats.
local function is_full(job)
  local taken = redis.call('HLEN', job.base .. 'joined')
  if job.generation ~= '0' then
    taken = taken + redis.call('SCARD', job.base .. 'awaited') + tonumber(job.unknown)
  end
  return taken >= tonumber(job.max_nodes)
end
