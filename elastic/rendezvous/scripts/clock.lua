-- The transitions that time makes, by whoever calls next; a dozen times per lease at most.

-- After the server's clock was set back, leases would last for as long as that.
local function start_clock_anew()
  local all = redis.call('ZRANGE', leases, 0, -1)
  for _, name in ipairs(all) do
    redis.call('ZADD', leases, text(now + lease_ms), name)
    redis.call('PEXPIRE', beat_key(name), J.lease_ms)
  end
  if num('last_call_at') > 0 then
    set('last_call_at', text(now + num('last_call_ms')))
  end
  redis.call('DEL', key('quarantine'))
  set('expired_at', '0')
end

local function find_median()
  local count = redis.call('ZCARD', busy)
  if count > 0 then
    local middle = math.floor((count - 1) / 2)
    local found = redis.call('ZRANGE', busy, middle, middle, 'WITHSCORES')
    if found[2] ~= J.median then
      set('median', found[2])
    end
  end
end

local function reap()
  if num('unknown') > 0 then
    -- They had a whole lease to say that they are still there.
    set('unknown', '0')
    local cause = 'nodes were lost while the store was away'
    change(cause)
    over(cause)
  end
  local due = redis.call('ZRANGEBYSCORE', leases, '-inf', '(' .. text(now), 'LIMIT', 0, 500)
  for _, name in ipairs(due) do
    local left = redis.call('PTTL', beat_key(name))
    if left > 0 then
      redis.call('ZADD', leases, text(now + left), name)  -- it was heard since, if not in full
    else
      local row = forget(name)
      if row then miss(name, row, 'was lost') end
    end
  end
  if #due == 500 then
    set('tick', text(now - math.ceil(lease_ms / 12)))  -- more of them: the next caller goes on
  end
end

local has_ticked = false

local function tick()
  local since = now - num('tick')
  local is_back = since < -1000
  -- Leases have run out while membership was frozen. The first call after that looks at them before
  -- it may start a round: a round of nodes that are gone would end at once.
  local has_thawed = num('tick') < num('frozen_until') and not is_frozen()
  if since >= 0 and since * 12 < lease_ms and not has_thawed then
    return
  end
  set('tick', text(now))
  has_ticked = true
  if is_back then
    start_clock_anew()
  end
  -- Nobody was heard for so long: it was the store that was away. Nobody is lost before all had the
  -- time to come back.
  if is_back or since * 2 > lease_ms then
    set('frozen_until', text(now + lease_ms))
  end
  if now >= num('expired_at') then
    expire_all()
  end
  if not is_frozen() then
    reap()
  end
  find_median()
  try_round()
end

-- A server that lost its memory, in whole or the last writes of it, learns from its clients: a
-- generation never goes back, and a restart that was charged stays charged. Who is in that
-- generation is known when they have said so.
local function adopt()
  local seen = tonumber(ARGV[3])
  if tonumber(ARGV[5]) > num('restarts') then
    set('restarts', text(tonumber(ARGV[5])))
  end
  if seen > num('generation') then
    redis.call('DEL', members, awaited, completed, busy)
    local _, groups = string.match(ARGV[8], '^(%d+) (%d+) ')
    local is_mine = my_generation == ARGV[3] and my_nonce == ARGV[4] and groups
    set('state', 'running', 'generation', text(seen), 'nonce', ARGV[4], 'drain', '', 'change', '',
      'over', '', 'max_step', '-1', 'rate', '0', 'adopted', '1',
      'unknown', is_mine and groups or J.max_nodes, 'frozen_until', text(now + lease_ms))
    forget_failure()
  end
  if J.adopted == '1' and num('unknown') > 0 and ARGV[8] ~= '' and
    my_generation == J.generation and my_nonce == J.nonce and
    redis.call('HSETNX', members, node, ARGV[8]) == 1 then
    redis.call('HDEL', joined, node)  -- where it waited for this very generation
    redis.call('SADD', awaited, node)
    local _, groups = string.match(ARGV[8], '^(%d+) (%d+) ')
    set('unknown', text(math.max(0, tonumber(groups or '0') - redis.call('HLEN', members))))
  end
end

-- False where the node has no lease that it could renew: it is new, or was given up for lost.
local had_lease = false
if J.state ~= 'ended' then
  adopt()
  if redis.call('ZSCORE', leases, node) then
    redis.call('ZADD', leases, text(now + lease_ms), node)
    had_lease = true
  end
  tick()
end

local is_current = my_generation == J.generation and my_nonce == J.nonce
local my_members_row = redis.call('HGET', members, node)
