#ifndef DDP_COMM_ARENA_FREE_RANGES_H_
#define DDP_COMM_ARENA_FREE_RANGES_H_

#include <cstdint>
#include <map>
#include <optional>

#include "base/language.h"

namespace ddp::internal {

// A part of an arena's file.
struct ArenaRange {
  uint64_t offset = 0;
  uint64_t bytes = 0;

  friend bool operator==(const ArenaRange&, const ArenaRange&) = default;
};

// The unused ranges of an arena's file. Neighbouring ranges are one range. Thread-compatible.
class FreeRanges {
 public:
  // Adds a range that shares no byte with the unused ranges.
  void Add(ArenaRange range);

  // Takes `bytes` from the lowest range that has as many. Returns the offset; nullopt when no range
  // is large enough. O(ranges).
  std::optional<uint64_t> Take(uint64_t bytes);

 private:
  std::map<uint64_t, uint64_t> bytes_by_offset_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ARENA_FREE_RANGES_H_
