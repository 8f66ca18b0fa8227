-- Chooses the job of a run id for an agent: an open one, or a new one, so that no job sees the
-- state of an earlier one. This script stands behind instances.lua and permissions.lua, without the
-- prelude.
--
-- KEYS  1 the counter of instances, 2 the instance given to this request (it may be sent again)
-- args  prefix       of the run's keys
--       wanted       the wanted instance, or 0: chosen here
--       token        of this request, and of the job if it is new
--       is_known     '1': wanted and token name a job that the agent knows. Where the server has
--                    forgotten it, it is made anew: under another number, if another job has that
--                    one. If that other job has not begun, it is abandoned and its nodes come to
--                    this one
--       fingerprint  '' for none
--       request_ttl_ms   time to live of the request
--       The others are the job's fields of the same names, if it is new.
-- Reply: {instance, token, lease in ms, max_restarts, min_nodes, max_nodes}: the job's own; and
--        the policy by which the server evicts keys, or ''. The
--        token is '' where the wanted instance does not exist.
local server_time = redis.call('TIME')
local now = string.format('%.0f', server_time[1] * 1000 + math.floor(server_time[2] / 1000))
local prefix, wanted, token = args.prefix, args.wanted, args.token
local open_set = open_key(prefix, args.fingerprint)

local function job_of(instance)
  return prefix .. 'i' .. instance .. ':job'
end

-- Returns the first refused command of this script and of a job's transitions, or nil.
local function refused_command()
  for _, command in ipairs(redis.acl_check_cmd and {
    {'GET', KEYS[1]}, {'SET', KEYS[1], '1'}, {'INCR', KEYS[1]}, {'PEXPIRE', KEYS[1], '1'},
    {'GET', KEYS[2]}, {'SET', KEYS[2], '1', 'PX', '1'},
    {'ZADD', open_set, '1', '1'}, {'ZREM', open_set, '1'},
    {'ZRANGE', open_set, '0', '-1'},
    {'PEXPIRE', open_set, '1'},
  } or {}) do
    if not redis.acl_check_cmd(unpack(command)) then
      return command
    end
  end
  return refused_for_job(prefix .. 'i' .. (wanted == '0' and '1' or wanted) .. ':', 'node')
end

local refused = refused_command()
if refused then
  return refusal(refused)
end

local function create(instance)
  local job = job_of(instance)
  redis.call('HSET', job, 'opened', now, 'tick', now)
  for _, name in ipairs({'token', 'fingerprint', 'ttl_ms', 'lease_ms', 'heartbeat_ms',
    'max_restarts', 'min_nodes', 'max_nodes', 'last_call_ms', 'no_progress_limit',
    'quarantine_strikes', 'cooldown_ms', 'max_node_losses', 'scale_up_delay_ms', 'node_unit'}) do
    redis.call('HSET', job, name, args[name])
  end
  redis.call('HSET', job, 'state', 'forming', 'generation', '0', 'nonce', '', 'restarts', '0',
    'drain', '', 'drain_stop', '-1', 'change', '', 'excused', '', 'lost_host', '', 'losses', '0',
    'over', '', 'reason', '', 'charged', '0',
    'max_step', '-1', 'rate', '0', 'median', '-1', 'unknown', '0', 'adopted', '0',
    'frozen_until', '0', 'last_call_at', '0', 'expired_at', '0', 'no_progress', '0',
    'counts_steps', '0', 'first_step', '-1', 'after_drain', '0', 'newcomer_at', '0',
    'newcomers_since', '0', 'max_world', '0', 'server', server_run(),
    'fail_cause', '', 'fail_host', '', 'fail_rank', '', 'fail_exit', '', 'fail_victim', '',
    'fail_at', '', 'fail_progress', '', 'fail_step', '-1', 'world_size', '0',
    'end_kind', '', 'end_exit', '0', 'end_reason', '')
  redis.call('PEXPIRE', job, args.ttl_ms)
  redis.call('ZADD', open_set, instance, instance)
  redis.call('PEXPIRE', open_set, args.ttl_ms)
end

-- Returns the server's policy where it evicts keys when its memory is short; '' where it evicts
-- none, or where this user may not ask.
local function evicting_policy()
  local info = info_of('memory')
  local policy = string.match(info, 'maxmemory_policy:(%S+)') or 'noeviction'
  return string.match(info, 'maxmemory:0') == nil and policy ~= 'noeviction' and policy or ''
end

local function answer(instance)
  local found = redis.call('HMGET', job_of(instance), 'token', 'lease_ms', 'max_restarts',
    'min_nodes', 'max_nodes')
  return {instance, found[1] or '', found[2] or args.lease_ms, found[3] or args.max_restarts,
    found[4] or args.min_nodes, found[5] or args.max_nodes, evicting_policy()}
end

-- A server that lost the counter must not give a number out twice.
local function raise_counter(instance)
  if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(instance) then
    redis.call('SET', KEYS[1], instance)
  end
  redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
end

local function new_number()
  for _ = 1, 1000 do
    local given = string.format('%.0f', redis.call('INCR', KEYS[1]))
    if redis.call('EXISTS', job_of(given)) == 0 then
      return given
    end
  end
  error('the numbers of a thousand instances are taken')
end

-- Ends the instance. A node that still asks about it is answered `reopen`.
local function abandon(instance)
  redis.call('HSET', job_of(instance), 'state', 'ended', 'end_kind', 'abandoned', 'end_exit', '0',
    'end_reason', 'all nodes of the job were lost')
  redis.call('ZREM', open_set, instance)
end

-- Returns another job of this run id that has begun in the meantime, under any number: a run id's
-- job must not run twice. Abandons jobs that have not begun.
local function successor()
  for _, found in ipairs(open_jobs(prefix, args.fingerprint)) do
    local name, job = found[1], found[2]
    local freshest = redis.call('ZREVRANGE', job.base .. 'leases', 0, 0, 'WITHSCORES')
    if job.generation == '0' then
      abandon(name)
    elseif freshest[2] and tonumber(freshest[2]) >= tonumber(now) then
      return name
    end
  end
end

local function restore()
  raise_counter(wanted)
  local found = redis.call('HMGET', job_of(wanted), 'token', 'state', 'generation', 'fingerprint')
  if found[1] == token then
    return wanted
  end
  local newest = tonumber(redis.call('GET', KEYS[1]))
  for instance = newest, math.max(1, newest - instances_max + 1), -1 do
    local name = string.format('%.0f', instance)
    if redis.call('HGET', job_of(name), 'token') == token then
      return name
    end
  end
  local other = args.fingerprint == '' and successor()
  if other then
    return other  -- the agent sees a different token
  end
  if not found[1] then
    create(wanted)
    return wanted
  end
  if found[2] ~= 'ended' and (found[3] ~= '0' or found[4] ~= args.fingerprint) then
    return wanted  -- a job that has begun keeps its number; the agent sees a different token
  end
  if found[2] ~= 'ended' then
    abandon(wanted)
  end
  local given = new_number()
  create(given)
  return given
end

if wanted ~= '0' then
  return answer(args.is_known == '1' and restore() or wanted)
end

-- Returns the oldest open instance. Where agents meet by a fingerprint it must have a free seat.
-- Abandons deserted instances.
local function open_instance()
  for _, found in ipairs(open_jobs(prefix, args.fingerprint)) do
    local name, job = found[1], found[2]
    if is_deserted(job, now) then
      abandon(name)
    elseif args.fingerprint == '' or not is_full(job) then
      return name
    end
  end
end

local given = redis.call('GET', KEYS[2])
if given then
  return answer(given)
end
given = open_instance()
if given then
  return answer(given)
end
given = new_number()
create(given)
redis.call('SET', KEYS[2], given, 'PX', args.request_ttl_ms)
redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
return answer(given)
