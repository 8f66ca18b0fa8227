-- When a round is complete, and which node gets which group rank.

-- Calls a command with a list of arguments that may be longer than Lua can pass at once.
local function call_in_pieces(command, list_key, list)
  for from = 1, #list, 1000 do
    redis.call(command, list_key, unpack(list, from, math.min(from + 999, #list)))
  end
end

local function parse_offer(name, value)
  local arrival, nproc, port, wanted, role, host, address =
    string.match(value, '^(%d+) (%d+) (%d+) (%-?%d+)\n([^\n]*)\n([^\n]*)\n([^\n]*)$')
  return {name = name, arrival = tonumber(arrival), nproc = tonumber(nproc), port = port,
    wanted = tonumber(wanted), role = role, host = host, address = address}
end

-- Returns the first of `offers` that get a seat beside `nodes` nodes with `world` workers. `min`
-- nodes get one whatever the program accepts.
local function fitting(offers, nodes, world, min)
  local found, limit = {}, num('max_world')
  for _, offer in ipairs(offers) do
    local count = nodes + #found
    if count < num('max_nodes') and
      (count < min or limit == 0 or world + offer.nproc <= limit) then
      found[#found + 1] = offer
      world = world + offer.nproc
    end
  end
  for i = #found, #found - (nodes + #found) % num('node_unit') + 1, -1 do
    found[i] = nil
  end
  return found
end

-- Chooses the nodes that get a seat: survivors first, then by arrival. A machine in quarantine gets
-- a seat only where the round would have fewer than min_nodes without it.
local function choose()
  local old_ranks = {}
  local old = redis.call('HGETALL', members)
  for i = 1, #old, 2 do
    old_ranks[old[i]] = rank_of(old[i + 1])
  end
  local any_quarantine = redis.call('EXISTS', key('quarantine')) == 1
  local free, held = {}, {}
  local all = redis.call('HGETALL', joined)
  for i = 1, #all, 2 do
    local offer = parse_offer(all[i], all[i + 1])
    offer.old_rank = old_ranks[offer.name]
    local list = any_quarantine and is_quarantined(offer.host) and held or free
    list[#list + 1] = offer
  end
  local function comes_first(a, b)
    local x, y = a.old_rank or 1e9, b.old_rank or 1e9
    if x ~= y then return x < y end
    if a.arrival ~= b.arrival then return a.arrival < b.arrival end
    return a.name < b.name
  end
  if #free == 0 then
    free, held = held, {}  -- every machine is in quarantine
  end
  table.sort(free, comes_first)
  table.sort(held, comes_first)
  local min = num('min_nodes')
  for _, offer in ipairs(held) do
    if #free >= min then break end
    free[#free + 1] = offer
  end
  return fitting(free, 0, 0, min)
end

-- Newcomers wait at most so long for further ones.
local gather_ms_max = 300000

-- A generation makes so many steps after a drain before nodes that join drain it again.
local steps_between_drains = 50

local function made_steps_since_drain()
  return J.after_drain ~= '1' or not counts_steps() or
    num('max_step') - num('first_step') >= steps_between_drains
end

-- Returns the waiting nodes that the running generation could take in, by arrival.
local function takeable()
  local found = {}
  local all = redis.call('HGETALL', joined)
  for i = 1, #all, 2 do
    local offer = parse_offer(all[i], all[i + 1])
    if not is_quarantined(offer.host) then found[#found + 1] = offer end
  end
  table.sort(found, function(a, b)
    if a.arrival ~= b.arrival then return a.arrival < b.arrival end
    return a.name < b.name
  end)
  return fitting(found, redis.call('HLEN', members), num('world_size'), 0)
end

-- Drains the running generation for nodes that wait, when all that come soon have come.
local function try_scale_up()
  local waiting = redis.call('HLEN', joined)
  if J.state ~= 'running' or J.drain ~= '' or waiting == 0 or num('unknown') > 0 or is_frozen() or
    redis.call('SCARD', completed) > 0 then
    return
  end
  local nodes, delay = redis.call('HLEN', members), num('scale_up_delay_ms')
  local max = num('max_nodes')
  if nodes >= max or (delay > 0 and not made_steps_since_drain()) then
    return
  end
  local has_gathered = now - num('newcomer_at') >= delay or
    now - num('newcomers_since') >= gather_ms_max
  local taken = (has_gathered or nodes + waiting >= max) and takeable() or {}
  if not has_gathered and nodes + #taken < max then
    return  -- some wait in quarantine, or have more workers than the program accepts
  end
  if #taken == 1 then
    start_drain('node ' .. taken[1].host .. ' joins')
  elseif #taken > 1 then
    start_drain(#taken .. ' nodes join')
  end
end

-- Assigns group ranks from 0 and returns the list of offers by rank. Order: wanted ranks, survivors
-- at their old ranks, then all others in the holes, with nodes of one machine side by side.
local function seat(chosen)
  local by_rank, rest = {}, {}
  local function take(offer, rank)
    if rank and rank >= 0 and rank < #chosen and not by_rank[rank + 1] and not offer.sits then
      by_rank[rank + 1], offer.sits = offer, true
    end
  end
  for _, offer in ipairs(chosen) do
    if offer.old_rank == offer.wanted then take(offer, offer.wanted) end
  end
  for _, offer in ipairs(chosen) do take(offer, offer.wanted) end
  for _, offer in ipairs(chosen) do take(offer, offer.old_rank) end
  for _, offer in ipairs(chosen) do
    if not offer.sits then rest[#rest + 1] = offer end
  end
  table.sort(rest, function(a, b)
    if a.host ~= b.host then return a.host < b.host end
    return a.name < b.name
  end)
  local hole = 1
  for _, offer in ipairs(rest) do
    while by_rank[hole] do hole = hole + 1 end
    by_rank[hole] = offer
  end
  return by_rank
end

-- Writes the row of each node: its place among all nodes, so that a reply needs nothing of the
-- others.
-- "group_rank groups nproc first_rank world first_role_rank role_world master_port\n
--  role\nhost\nmaster_address".
local function write_rows(by_rank)
  local world, role_worlds = 0, {}
  for _, offer in ipairs(by_rank) do
    offer.first, offer.first_in_role = world, role_worlds[offer.role] or 0
    world = world + offer.nproc
    role_worlds[offer.role] = offer.first_in_role + offer.nproc
  end
  local rows_of, names = {}, {}
  local master = by_rank[1]
  for i, offer in ipairs(by_rank) do
    names[i] = offer.name
    rows_of[2 * i - 1] = offer.name
    rows_of[2 * i] = string.format('%d %d %d %d %d %d %d %s\n%s\n%s\n%s', i - 1, #by_rank,
      offer.nproc, offer.first, world, offer.first_in_role, role_worlds[offer.role], master.port,
      offer.role, offer.host, master.address)
  end
  redis.call('DEL', members, awaited, completed, busy)
  call_in_pieces('HSET', members, rows_of)
  call_in_pieces('SADD', awaited, names)
  call_in_pieces('HDEL', joined, names)
  return world
end

local function start_generation()
  if num('generation') > 0 and not conclude() then
    return
  end
  if num('generation') > 0 then
    set('old_stores', (J.old_stores or '') .. J.generation .. '.' .. J.nonce .. ' ')
  end
  local was_drained = J.change ~= '' and J.excused ~= '1'
  local by_rank = seat(choose())
  local world = write_rows(by_rank)
  forget_failure()
  set('state', 'running', 'generation', text(num('generation') + 1), 'nonce', args.next_nonce,
    'world_size', text(world), 'drain', '', 'change', '', 'excused', '', 'lost_host', '',
    'over', '', 'max_step', '-1', 'rate', '0', 'median', '-1', 'unknown', '0', 'adopted', '0',
    'last_call_at', '0', 'first_step', '-1', 'after_drain', was_drained and '1' or '0',
    'newcomer_at', '0', 'newcomers_since', '0')
  expire_all()
  publish('round')
end

-- True where a waiting node may be gone: while membership is frozen, lapsed leases still count.
local function some_may_be_gone(present)
  return is_frozen() and redis.call('ZCOUNT', leases, text(now), '+inf') < present
end

-- The first round starts at max_nodes, or at the end of a last call that begins at min_nodes.
local function try_first_round(present)
  if present >= num('max_nodes') and not some_may_be_gone(present) then
    return start_generation()
  end
  if present < num('min_nodes') then
    if num('last_call_at') > 0 then set('last_call_at', '0') end
  elseif num('last_call_at') == 0 then
    set('last_call_at', text(now + num('last_call_ms')))
  elseif now >= num('last_call_at') and not is_frozen() then
    start_generation()
  end
end

-- Starts the next generation as soon as no member is missing. Every transition may call it.
local function try_round()
  if J.state == 'ended' or num('unknown') > 0 or (J.state == 'running' and J.drain == '') then
    return
  end
  if J.generation == '0' then
    return try_first_round(redis.call('HLEN', joined))
  end
  local missing = redis.call('SCARD', awaited)
  if J.state == 'running' then
    local done = redis.call('SCARD', completed)
    if missing > done then
      return  -- the other members still run to the common step
    end
    if done > 0 then
      if redis.call('HLEN', members) == done then
        return end_job('succeeded', '0', '')
      end
      -- Some members have finished and the others have not: all take part in the next generation.
      return over(J.drain)
    end
  end
  if missing > 0 then
    return
  end
  local present = redis.call('HLEN', joined)
  if redis.call('HLEN', members) == 0 and present > 0 then
    -- No member of the last generation is left. Nodes that came later inherit nothing of the job.
    return end_job('abandoned', '0', 'all nodes of the job were lost')
  end
  if present < num('min_nodes') then
    over(J.drain)
  elseif not some_may_be_gone(present) then
    start_generation()
  end
end

local function try_success()
  local done = redis.call('SCARD', completed)
  if J.state == 'running' and done > 0 and num('unknown') == 0 and
    done >= redis.call('HLEN', members) then
    end_job('succeeded', '0', '')
  end
end
