-- Transitions that time causes: a node whose lease has expired is lost here. The next script makes
-- them, a dozen times per lease at most.

-- After the server's clock was set back, restarts all leases, and moves every time that has passed
-- out of the future: else what waits for a time would wait that much longer.
local function start_clock_anew()
  local all = redis.call('ZRANGE', leases, 0, -1)
  for _, name in ipairs(all) do
    redis.call('ZADD', leases, text(now + lease_ms), name)
  end
  if num('last_call_at') > 0 then
    set('last_call_at', text(now + num('last_call_ms')))
  end
  for _, name in ipairs({'reported_at', 'drain_at', 'newcomer_at', 'newcomers_since'}) do
    if num(name) > now then
      set(name, text(now))
    end
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
    -- The unknown members had a whole lease to register again.
    set('unknown', '0')
    local cause = 'nodes were lost while the store was away'
    change_unannounced(cause)
    over(cause)
  end
  local due = redis.call('ZRANGEBYSCORE', leases, '-inf', '(' .. text(now), 'LIMIT', 0, 500)
  for _, name in ipairs(due) do
    local row = forget(name)
    if row then miss(name, row, 'was lost') end
  end
  if #due == 500 then
    set('tick', text(now - math.ceil(lease_ms / 12)))  -- the next script continues
  end
end

-- Deletes the workers' stores of earlier generations, at most 1,000 values at a time.
local function delete_old_store()
  local first = string.match(J.old_stores or '', '^%S+')
  if not first then
    return
  end
  local values = key('g' .. first .. ':store:values')
  if redis.call('HLEN', values) > 1000 then
    local found = redis.call('HSCAN', values, '0', 'COUNT', 500)[2]
    for i = 1, #found, 2 do
      redis.call('HDEL', values, found[i])
    end
    return
  end
  redis.call('DEL', values)
  set('old_stores', string.match(J.old_stores, '^%S+%s*(.*)$'))
end

-- Returns true where the server has started again, or another one has taken its place: it may have
-- lost renewals of leases.
local function is_another_server()
  local before, run = J.server or '', server_run()
  if run ~= '' and run ~= before then
    set('server', run)
  end
  return run ~= '' and before ~= '' and run ~= before
end

local function tick()
  local since = now - num('tick')
  local is_back = since < -1000
  -- Leases have run out while membership was frozen. The first script after that must expire them
  -- before it starts a round: a round with lost nodes would end at once.
  local has_thawed = num('tick') < num('frozen_until') and not is_frozen()
  if since >= 0 and since * 12 < lease_ms and not has_thawed then
    return
  end
  set('tick', text(now))
  if is_back then
    start_clock_anew()
  end
  -- When no script has run for half a lease, the store was away. Freeze membership for one lease,
  -- in which all nodes can come back.
  if is_another_server() or is_back or since * 2 > lease_ms then
    set('frozen_until', text(now + lease_ms))
  end
  if now >= num('expired_at') then
    expire_all()
  end
  if not is_frozen() then
    reap()
  end
  find_median()
  delete_old_store()
  try_scale_up()
  try_round()
end

local is_mended = false

-- The server has evicted the key of the members: the members register themselves again.
local function mend_members()
  local _, groups = string.match(args.row, '^(%d+) (%d+) ')
  if J.state == 'running' and num('unknown') == 0 and groups and my_generation == J.generation and
    my_nonce == J.nonce and redis.call('EXISTS', members) == 0 then
    set('adopted', '1', 'unknown', groups, 'frozen_until', text(now + lease_ms))
    is_mended = true
  end
end

-- Adopts the state that a node presents, where the server has lost all its memory or its last
-- writes. A generation never goes back, and a charged restart stays charged. The members of the
-- adopted generation register themselves.
local function adopt()
  mend_members()
  local seen = tonumber(args.seen_generation)
  if tonumber(args.seen_restarts) > num('restarts') then
    set('restarts', text(tonumber(args.seen_restarts)))
  end
  if seen > num('generation') then
    redis.call('DEL', members, awaited, completed, busy)
    local _, groups = string.match(args.row, '^(%d+) (%d+) ')
    local is_mine = my_generation == args.seen_generation and my_nonce == args.seen_nonce and groups
    set('state', 'running', 'generation', text(seen), 'nonce', args.seen_nonce, 'drain', '',
      'change', '', 'excused', '', 'lost_host', '', 'over', '', 'max_step', '-1', 'rate', '0',
      'adopted', '1', 'unknown', is_mine and groups or J.max_nodes,
      'frozen_until', text(now + lease_ms))
    forget_failure()
  end
  if J.adopted == '1' and num('unknown') > 0 and args.row ~= '' and
    my_generation == J.generation and my_nonce == J.nonce and
    redis.call('HSETNX', members, node, args.row) == 1 then
    redis.call('HDEL', joined, node)  -- it was waiting for the adopted generation
    redis.call('SADD', awaited, node)
    local _, groups = string.match(args.row, '^(%d+) (%d+) ')
    set('unknown', text(math.max(0, tonumber(groups or '0') - redis.call('HLEN', members))))
  end
end

-- False where the node has no lease to renew: the node is new, or was given up for lost.
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
