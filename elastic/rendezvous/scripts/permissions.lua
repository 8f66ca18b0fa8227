-- Checks that the server's ACL allows this user all commands of a transition. A command that is
-- refused in the middle of a script would leave half a transition behind, so a script asks before
-- its first write. Redis 6 cannot be asked (redis.acl_check_cmd is new in Redis 7).
--
-- The list has each command, and each key of a job, at least once.

-- Returns a section of the server's INFO, or '' where this user may not ask.
local function info_of(section)
  if redis.acl_check_cmd and not redis.acl_check_cmd('INFO', section) then
    return ''
  end
  local info = redis.pcall('INFO', section)
  return type(info) == 'string' and info or ''
end

-- Returns the id of this run of the server, which a restart and a fail-over change; '' if unknown.
local function server_run()
  return string.match(info_of('server'), 'run_id:(%x+)') or ''
end

-- Returns the first refused command of a job's transitions on keys with the prefix `base`, or nil.
local function refused_for_job(base, name)
  local may = redis.acl_check_cmd
  if not may then
    return nil
  end
  local job, leases = base .. 'job', base .. 'leases'
  local joined, members = base .. 'joined', base .. 'members'
  local run = string.match(base, '^(.*:)i%d+:$')
  local counter = run .. 'instance'
  for _, command in ipairs({
    {'TIME'}, {'PUBLISH', base .. 'news', ''},
    {'HSET', job, 'f', 'v'}, {'HMGET', job, 'f'}, {'HGETALL', job}, {'EXISTS', job},
    {'PEXPIRE', job, '1'},
    {'GET', counter}, {'SET', counter, '1'}, {'PEXPIRE', counter, '1'},
    {'ZADD', run .. 'open:', '1', '1'}, {'ZREM', run .. 'open:', '1'},
    {'ZADD', leases, '1', name}, {'ZREM', leases, name}, {'ZSCORE', leases, name},
    {'ZCOUNT', leases, '1', '2'}, {'ZRANGE', leases, '0', '0'}, {'ZREVRANGE', leases, '0', '0'},
    {'ZRANGEBYSCORE', leases, '1', '2'},
    {'HSET', joined, name, 'v'}, {'HDEL', joined, name}, {'HLEN', joined},
    {'HEXISTS', joined, name},
    {'HSETNX', members, name, 'v'}, {'HGET', members, name}, {'DEL', members},
    {'HKEYS', members}, {'HLEN', base .. 'g1.0:store:values'},
    {'HSCAN', base .. 'g1.0:store:values', '0'}, {'HDEL', base .. 'g1.0:store:values', 'v'},
    {'DEL', base .. 'g1.0:store:values'},
    {'SADD', base .. 'awaited', name}, {'SCARD', base .. 'awaited'},
    {'SMEMBERS', base .. 'awaited'},
    {'SREM', base .. 'completed', name}, {'SISMEMBER', base .. 'gone', name},
    {'SADD', base .. 'gone', name}, {'SADD', base .. 'lost', name},
    {'HSET', base .. 'rows', name, 'v'},
    {'ZADD', base .. 'busy', '1', name}, {'ZCARD', base .. 'busy'},
    {'HSET', base .. 'strikes', 'f', 'v'}, {'HSET', base .. 'quarantine', 'f', 'v'},
    {'LPUSH', base .. 'failures', 'v'}, {'LTRIM', base .. 'failures', '0', '19'},
  }) do
    if not may(unpack(command)) then
      return command
    end
  end
end

local function refusal(command)
  return redis.error_reply('NOPERM the rules of this user refuse ' .. command[1] .. ' ' ..
    (command[2] or '') .. ', which a job needs; nothing was changed')
end
