#include "ddp/comm/check/collective_log.h"

#include <array>
#include <cstring>
#include <utility>

#include <xxhash.h>

#include "ddp/comm/check/mismatch.h"
#include "ddp/common/rpc_place.h"

namespace ddp::internal {
namespace {

constexpr int kSequenceBits = 12;

// Number of collectives that a position shows, from the oldest one that is not complete on.
constexpr int64_t kShown = 64;
// Number of complete collectives that a position shows before those.
constexpr int64_t kShownComplete = 8;

uint64_t Fingerprint(const CollectiveCall& call, int64_t sequence) {
  // Ranks that have changed a parameter differently are in the same comparison.
  const std::string_view text =
      call.what.text().substr(0, call.what.text().find(kChangeOfParameter));
  const std::array<int64_t, 6> numbers = {sequence,  call.elements, call.bytes,
                                          call.root, call.sparse,   call.what.index()};
  uint64_t hash = XXH3_64bits(numbers.data(), sizeof(numbers));
  hash = XXH3_64bits_withSeed(call.operation, std::strlen(call.operation), hash);
  hash = XXH3_64bits_withSeed(call.dtype, std::strlen(call.dtype), hash);
  return XXH3_64bits_withSeed(text.data(), text.size(), hash);
}

}  // namespace

uint32_t CollectiveLog::Add(CollectiveCall call) {
  MutexLock lock(mutex_);
  const int64_t sequence = launched_++;
  launcher_ = std::this_thread::get_id();
  const uint64_t fingerprint = Fingerprint(call, sequence);
  entries_.push_back({.fingerprint = fingerprint, .call = std::move(call)});
  constexpr uint32_t kMask = (1U << kSequenceBits) - 1;
  return (static_cast<uint32_t>(fingerprint) & ~kMask) | (static_cast<uint32_t>(sequence) & kMask);
}

void CollectiveLog::SetCompleteBefore(int64_t sequence) {
  MutexLock lock(mutex_);
  complete_before_ = sequence;
  const int64_t kept = launched_ - sequence + kShownComplete;
  while (static_cast<int64_t>(entries_.size()) > kept) entries_.pop_front();
}

int64_t CollectiveLog::launched() const {
  MutexLock lock(mutex_);
  return launched_;
}

RankPosition CollectiveLog::Position() const {
  MutexLock lock(mutex_);
  // The launcher cannot add a collective meanwhile.
  RankPosition position{.launched = launched_, .rpc = OwnRpcPlace::Of(launcher_)};
  int64_t sequence = launched_ - static_cast<int64_t>(entries_.size());
  for (const Entry& entry : entries_) {
    if (sequence == complete_before_ + kShown) break;
    position.newest.push_back({.sequence = sequence++,
                               .fingerprint = entry.fingerprint,
                               .operation = entry.call.operation,
                               .what = entry.call.what.ToString(),
                               .dtype = entry.call.dtype,
                               .bytes = entry.call.bytes,
                               .root = entry.call.root});
  }
  return position;
}

}  // namespace ddp::internal
