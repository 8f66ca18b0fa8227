-- The members of the job, and the consequences when they change. This file makes no transition by
-- itself.
--
-- Keys: joined     hash: node -> arrival and offer, of the nodes that wait for the next round
--       members    hash: node -> its row, of the current generation (also while the next forms)
--       awaited    set: the members that have not joined the next round
--       completed  set: the members whose workers have all succeeded, and that have not joined
--       rows       hash: node -> its report for people
--       busy       sorted set: node -> us of own work per step
--       strikes, quarantine, lost   see budget.lua
--       gone       set: nodes that have left for good; their late scripts are void
--       failures   list: the last failures and losses of the job
--       news       the channel
local function key(name)
  return string.sub(job_key, 1, -4) .. name
end

local refused = refused_for_job(key(''), node)
if refused then
  return refusal(refused)
end

local joined, members, awaited = key('joined'), key('members'), key('awaited')
local completed, rows, busy = key('completed'), key('rows'), key('busy')

local fields = redis.call('HGETALL', job_key)
local J = {}
for i = 1, #fields, 2 do
  J[fields[i]] = fields[i + 1]
end

local function text(number)
  return string.format('%.0f', number)
end

local function num(name)
  return tonumber(J[name] or '') or 0
end

-- Writes fields to Redis and to J: set(name, value, ...).
local function set(...)
  redis.call('HSET', job_key, ...)
  local pairs_given = {...}
  for i = 1, #pairs_given, 2 do
    J[pairs_given[i]] = pairs_given[i + 1]
  end
end

local lease_ms = num('lease_ms')

local function reply(outcome, ...)
  return {outcome, J.generation, J.nonce, J.restarts, ...}
end

-- Returns the host of the failure that has ended the job, or ''.
local function end_host()
  local is_failure = J.end_kind == 'budget_spent' or J.end_kind == 'no_progress' or
    J.end_kind == 'nodes_lost'
  return is_failure and J.fail_host or ''
end

local function ended_reply()
  if J.end_kind == 'abandoned' then
    return reply('reopen')
  end
  return reply('ended', J.end_kind, J.end_exit, J.end_reason, end_host())
end

-- Publishes a message of one line per field: token, kind, generation, nonce, further fields.
local function publish(kind, ...)
  redis.call('PUBLISH', key('news'),
    table.concat({token, kind, J.generation, J.nonce, ...}, '\n'))
end

-- The set of open instances with this job's fingerprint: see instances.lua.
local function open_set()
  return string.match(key(''), '^(.*:)i%d+:$') .. 'open:' .. J.fingerprint
end

-- Renews all keys, and the counter and the set of instances: without them a node that comes later
-- would open a job of its own.
local function expire_all()
  local run, number = string.match(key(''), '^(.*:)i(%d+):$')
  local counter = run .. 'instance'
  if tonumber(redis.call('GET', counter) or '0') < tonumber(number) then
    redis.call('SET', counter, number)
  end
  redis.call('PEXPIRE', counter, J.ttl_ms)
  if J.state ~= 'ended' then
    redis.call('ZADD', open_set(), number, number)
    redis.call('PEXPIRE', open_set(), J.ttl_ms)
  end
  for _, name in ipairs({'job', 'leases', 'joined', 'members', 'awaited', 'completed', 'rows',
    'busy', 'strikes', 'quarantine', 'lost', 'gone', 'failures'}) do
    redis.call('PEXPIRE', key(name), J.ttl_ms)
  end
  set('expired_at', text(now + 60000))
end

-- Returns the host of an offer or a row: "numbers\nrole\nhost\naddress".
local function host_of(offer_or_row)
  return string.match(offer_or_row, '^[^\n]*\n[^\n]*\n([^\n]*)\n') or '?'
end

local function rank_of(row)
  return tonumber(string.match(row, '^%d+')) or 0
end

local function is_frozen()
  return now < num('frozen_until')
end

local function log_failure(charged, cause)
  redis.call('LPUSH', key('failures'), table.concat({J.fail_at ~= '' and J.fail_at or text(now),
    J.generation, J.fail_rank ~= '' and J.fail_rank or '-1', charged, J.fail_host, cause}, '\n'))
  redis.call('LTRIM', key('failures'), 0, 19)
end

local function end_job(kind, exit_code, reason)
  set('state', 'ended', 'end_kind', kind, 'end_exit', exit_code, 'end_reason', reason, 'drain', '')
  redis.call('ZREM', open_set(), string.match(key(''), 'i(%d+):$'))
  expire_all()
  publish('ended', kind, exit_code, reason, end_host())
end

-- Notes why the membership of the current generation changes.
local function change(cause)
  if J.change == '' then
    set('change', cause)
  end
end

-- Notes a change that no drain announced: no failure of this generation is charged.
local function change_unannounced(cause)
  change(cause)
  set('excused', '1')
end

-- Adds to `awaited` the members that it lacks, where the server has evicted that key.
local function mend_awaited()
  if redis.call('SCARD', awaited) + redis.call('HLEN', joined) >= redis.call('HLEN', members) then
    return
  end
  for _, name in ipairs(redis.call('HKEYS', members)) do
    if redis.call('HEXISTS', joined, name) == 0 then
      redis.call('SADD', awaited, name)
    end
  end
  redis.call('PEXPIRE', awaited, J.ttl_ms)
end

-- Ends the current generation and notifies all nodes.
local function over(cause)
  if J.state == 'running' then
    mend_awaited()
    set('state', 'forming', 'drain', '', 'over', cause)
    publish('over', cause)
  end
end

-- Asks all workers to stop after a common step. The generation is over when all members have joined
-- the next one. The step leaves three heartbeats: time for a node whose connection broke before the
-- push, and for the steps since the last report.
local function start_drain(cause)
  if J.state ~= 'running' or J.drain ~= '' then
    return
  end
  mend_awaited()
  local stop = -1
  if num('max_step') >= 0 then
    stop = num('max_step') + math.ceil(num('rate') * 3 * num('heartbeat_ms') / 1000) + 2
  end
  set('drain', cause, 'drain_stop', text(stop), 'drain_at', text(now))
  change(cause)
  publish('drain', J.drain_stop, cause)
end

-- Removes the node and its lease. Returns its row where it was a member.
local function forget(name)
  redis.call('ZREM', leases, name)
  redis.call('HDEL', joined, name)
  redis.call('HDEL', rows, name)
  redis.call('ZREM', busy, name)
  local row = redis.call('HGET', members, name)
  if row then
    redis.call('HDEL', members, name)
    redis.call('SREM', awaited, name)
  end
  return row
end

-- Handles the loss of a member. The loss of a member whose workers have succeeded changes nothing.
local function miss(name, row, what)
  if redis.call('SREM', completed, name) == 0 then
    local cause = 'node ' .. host_of(row) .. ' ' .. what
    change_unannounced(cause)
    if J.lost_host == '' then
      set('lost_host', host_of(row))
    end
    over(cause)
  end
end
