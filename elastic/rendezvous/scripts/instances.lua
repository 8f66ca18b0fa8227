-- Queries about the jobs of one run id, for open_instance.lua and join.lua. `prefix`: the common
-- prefix of the run's keys. `now`: the server's time in ms.

-- Number of newest instances among which an agent's own is looked for after a loss of memory.
local instances_max = 32

-- The set of the open instances with a fingerprint. Its members are scored by their numbers.
local function open_key(prefix, fingerprint)
  return prefix .. 'open:' .. fingerprint
end

local function look_at_job(prefix, instance)
  local job_key = prefix .. 'i' .. instance .. ':job'
  local found = redis.call('HMGET', job_key, 'fingerprint', 'state', 'generation', 'opened',
    'lease_ms', 'max_nodes', 'unknown')
  return {key = job_key, base = prefix .. 'i' .. instance .. ':', fingerprint = found[1],
    state = found[2], generation = found[3], opened = found[4], lease_ms = found[5],
    max_nodes = found[6], unknown = found[7]}
end

-- Returns the open jobs with a fingerprint, oldest first, as pairs {number, job}. Forgets those
-- whose keys have expired.
local function open_jobs(prefix, fingerprint)
  local found = {}
  local all = open_key(prefix, fingerprint)
  for _, name in ipairs(redis.call('ZRANGE', all, 0, -1)) do
    local job = look_at_job(prefix, name)
    if job.fingerprint == fingerprint and job.state ~= 'ended' then
      found[#found + 1] = {name, job}
    else
      redis.call('ZREM', all, name)
    end
  end
  return found
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
