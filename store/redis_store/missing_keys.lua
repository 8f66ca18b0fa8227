-- Returns the places of the missing keys in the list of keys, counted from 1.
--
-- KEYS[1]      the store's values
-- KEYS[i + 1]  the queue of the i-th key; a queue makes the key present
-- ARGV[i]      the i-th key
local missing = {}
for i, key in ipairs(ARGV) do
  if redis.call('HEXISTS', KEYS[1], key) == 0 and redis.call('EXISTS', KEYS[i + 1]) == 0 then
    missing[#missing + 1] = i
  end
end
return missing
