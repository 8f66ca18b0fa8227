-- A node offers itself for the next round; the last one to come completes it.
--
-- ARGV  9 offer, 10 nodes of a round, 11 the nonce of the generation, should this call start it,
--       12 the restarts that the job may spend
-- Outcomes: ended + state
--           waiting + nodes that have joined
--           round + a list: of each member its node, group rank and offer
local offer, nodes, new_nonce, max_restarts = ARGV[9], tonumber(ARGV[10]), ARGV[11], ARGV[12]

local function round()
  local table_of_ranks = {}
  local offers = redis.call('HGETALL', members)
  for i = 1, #offers, 2 do
    table_of_ranks[#table_of_ranks + 1] = offers[i]
    table_of_ranks[#table_of_ranks + 1] = redis.call('HGET', ranks, offers[i])
    table_of_ranks[#table_of_ranks + 1] = offers[i + 1]
  end
  return reply('round', table_of_ranks)
end

if state == 'failed' or state == 'succeeded' then
  return reply('ended', state)
end
redis.call('HSETNX', job, 'max_restarts', max_restarts)
renew_lease()

-- Sent again, because the reply that made the node a member was lost.
if generation > seen_generation and redis.call('HEXISTS', members, node) == 1 then
  return round()
end

redis.call('HSET', joined, node, offer)
local dead = redis.call('ZRANGEBYSCORE', leases, '-inf', '(' .. text(now_ms), 'LIMIT', 0, 100)
for _, name in ipairs(dead) do
  redis.call('ZREM', leases, name)
  redis.call('HDEL', joined, name)
end
local present = redis.call('HLEN', joined)
if present < nodes then
  return reply('waiting', text(present))
end

-- A survivor keeps its rank where the new round has it; the others fill the holes by name.
local names = redis.call('HKEYS', joined)
table.sort(names)
local holder, rank_of = {}, {}
for _, name in ipairs(names) do
  local rank = tonumber(redis.call('HGET', ranks, name) or '-1')
  if rank >= 0 and rank < present and not holder[rank] then
    holder[rank], rank_of[name] = name, rank
  end
end
local hole = 0
for _, name in ipairs(names) do
  if not rank_of[name] then
    while holder[hole] do
      hole = hole + 1
    end
    holder[hole], rank_of[name] = name, hole
  end
end

redis.call('DEL', ranks, completed, failures)
for _, name in ipairs(names) do
  redis.call('HSET', ranks, name, text(rank_of[name]))
end
redis.call('RENAME', joined, members)
generation, nonce = generation + 1, new_nonce
redis.call('HSET', job, 'generation', text(generation), 'nonce', nonce)
set_state('running')
return round()
