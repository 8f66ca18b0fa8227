#include "ddp/comm/arena/free_ranges.h"

#include <iterator>

#include <glog/logging.h>

namespace ddp::internal {

void FreeRanges::Add(ArenaRange range) {
  if (range.bytes == 0) return;
  auto next = bytes_by_offset_.lower_bound(range.offset);
  if (next != bytes_by_offset_.end()) {
    CHECK_LE(range.offset + range.bytes, next->first) << "a range that is unused already";
    if (range.offset + range.bytes == next->first) {
      range.bytes += next->second;
      next = bytes_by_offset_.erase(next);
    }
  }
  if (next != bytes_by_offset_.begin()) {
    const auto previous = std::prev(next);
    CHECK_LE(previous->first + previous->second, range.offset) << "a range that is unused already";
    if (previous->first + previous->second == range.offset) {
      previous->second += range.bytes;
      return;
    }
  }
  bytes_by_offset_.emplace_hint(next, range.offset, range.bytes);
}

std::optional<uint64_t> FreeRanges::Take(uint64_t bytes) {
  for (auto range = bytes_by_offset_.begin(); range != bytes_by_offset_.end(); ++range) {
    if (range->second < bytes) continue;
    const ArenaRange found = {.offset = range->first, .bytes = range->second};
    const auto next = bytes_by_offset_.erase(range);
    if (found.bytes > bytes) {
      bytes_by_offset_.emplace_hint(next, found.offset + bytes, found.bytes - bytes);
    }
    return found.offset;
  }
  return std::nullopt;
}

}  // namespace ddp::internal
