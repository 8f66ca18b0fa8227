-- Returns one page of the store's keys, without their values: the cursor of the next page ("0"
-- after the last one) and the keys.
--
-- KEYS[1]  the store's values
-- ARGV[1]  cursor
-- ARGV[2]  approximate number of keys in a page
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local keys = {}
for i = 1, #page[2], 2 do
  keys[#keys + 1] = page[2][i]
end
return {page[1], keys}
