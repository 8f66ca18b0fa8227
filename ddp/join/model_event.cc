#include "ddp/join/model_event.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::internal {
namespace {

// The kind is a bit above the bits of its details.
constexpr int kRebuildAfter = 1;
constexpr int kUsedMapAfter = 2;
constexpr int kUsedMapBefore = 4;
constexpr int kBuffersBefore = 1;
constexpr int kBuffersAfter = 2;
constexpr int kForward = 8;
constexpr int kDelayed = 16;
constexpr int kStatistics = 32;

}  // namespace

int ModelEvent::Encode() const {
  switch (kind) {
    case Kind::kDelayed:
      return kDelayed;
    case Kind::kStatistics:
      return kStatistics;
    case Kind::kForward:
      return kForward + (buffers_before ? kBuffersBefore : 0) + (buffers_after ? kBuffersAfter : 0);
    case Kind::kPass:
      break;
  }
  return (parts.rebuild_after ? kRebuildAfter : 0) + (parts.used_map_after ? kUsedMapAfter : 0) +
         (parts.used_map_before ? kUsedMapBefore : 0);
}

ModelEvent ModelEvent::Decode(int number) {
  const auto has = [number](int bit) { return (number & bit) != 0; };
  if (number == kDelayed) return {.kind = Kind::kDelayed};
  if (number == kStatistics) return {.kind = Kind::kStatistics};
  if (number >= kForward) {
    return {.kind = Kind::kForward,
            .buffers_before = has(kBuffersBefore),
            .buffers_after = has(kBuffersAfter)};
  }
  return {.kind = Kind::kPass,
          .parts = {.rebuild_after = has(kRebuildAfter),
                    .used_map_after = has(kUsedMapAfter),
                    .used_map_before = has(kUsedMapBefore)}};
}

std::string ModelEvent::ToString() const {
  if (kind == Kind::kDelayed) return "the all-reduce of delayed gradients";
  if (kind == Kind::kStatistics) return "the sum of a SyncBatchNorm";
  if (kind == Kind::kForward) {
    if (buffers_before) return "a forward that begins with buffers";
    return buffers_after ? "a forward that ends with buffers" : "a forward";
  }
  std::vector<std::string> with;
  if (parts.used_map_before) with.push_back("used parameters before it");
  if (parts.used_map_after) with.push_back("used parameters after it");
  if (parts.rebuild_after) with.push_back("new buckets at its end");
  return absl::StrCat("the reduction of gradients", with.empty() ? "" : ", with ",
                      absl::StrJoin(with, " and "), with.empty() ? "" : ",");
}

}  // namespace ddp::internal
