-- Which keys are missing? Returns their places in the list of keys, counted from 1.
--
-- KEYS[1]      the store's values
-- KEYS[i + 1]  the queue of the i-th key, where a queue counts as the key's presence; else none given
-- ARGV[i]      the i-th key
local with_queues = #KEYS > 1
local missing = {}
for i, key in ipairs(ARGV) do
  local present = redis.call('HEXISTS', KEYS[1], key) == 1
  if not present and with_queues then
    present = redis.call('EXISTS', KEYS[i + 1]) == 1
  end
  if not present then
    missing[#missing + 1] = i
  end
end
return missing
