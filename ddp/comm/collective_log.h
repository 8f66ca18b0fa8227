#ifndef DDP_COMM_COLLECTIVE_LOG_H_
#define DDP_COMM_COLLECTIVE_LOG_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "ddp/comm/operation_name.h"

namespace ddp::internal {

// One collective as one rank launches it: the properties in which all ranks must agree.
struct CollectiveCall {
  const char* operation = "";  // a literal: "all-reduce (sum)"
  const char* dtype = "";      // a literal: "Float"
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t root = -1;  // of a broadcast; -1: the operation has none
  bool sparse = false;
  OperationName what = "";  // "the all-reduce of gradient bucket 3"
};

// How far one rank has come in the collectives of one incarnation, as its peers read it.
struct RankPosition {
  struct Launched {
    int64_t sequence = 0;      // counted from 0
    uint64_t fingerprint = 0;  // equal on two ranks: the same collective
    std::string operation;
    std::string dtype;
    int64_t bytes = 0;
    std::string what;

    // "the all-reduce of gradient bucket 3 (4.0 MiB of Float)".
    std::string Describe() const;
  };

  int64_t launched = 0;               // collectives so far
  int64_t barriers = 0;               // monitored barriers that the rank has entered
  bool in_barrier = false;            // the rank waits in the last one of these
  std::vector<Launched> newest = {};  // by rising sequence, without a gap

  std::string Serialize() const;
  // Nullopt: not such a text.
  static std::optional<RankPosition> Parse(absl::string_view text);
};

// Remembers the collectives that a communicator launches, and numbers them. Its tags keep
// collectives apart that differ between the ranks: a backend that matches messages by tag then
// never matches two of different sizes, for which LibTorch's Gloo would end the process.
//
// Cost per collective: a hash of a few words and an uncontended lock. Thread-safe.
class CollectiveLog {
 public:
  CollectiveLog();

  // Records the next collective and returns its tag: the sequence number modulo 4096 in the low
  // bits, and a hash of the sequence number and the call above them. Two collectives in flight on
  // one rank have different tags. Different collectives of two ranks share one in 1 of 2^20 cases.
  uint32_t Add(CollectiveCall call);

  // All collectives before `sequence` are complete on this rank.
  void SetCompleteBefore(int64_t sequence);

  // The rank enters, or leaves, a monitored barrier: a wait for its peers through the store.
  void EnterBarrier();
  void LeaveBarrier();

  // A rank is in a monitored barrier while it lives. `log` may be null.
  class BarrierScope {
   public:
    explicit BarrierScope(CollectiveLog* log) : log_(log) {
      if (log_ != nullptr) log_->EnterBarrier();
    }
    ~BarrierScope() {
      if (log_ != nullptr) log_->LeaveBarrier();
    }
    BarrierScope(const BarrierScope&) = delete;
    BarrierScope& operator=(const BarrierScope&) = delete;

   private:
    CollectiveLog* const log_;
  };

  int64_t launched() const;
  RankPosition Position() const;

 private:
  struct Entry {
    uint64_t fingerprint = 0;
    CollectiveCall call;
  };
  void Grow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  // A ring; its size is a power of two and holds at least all collectives that are not complete.
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t launched_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t oldest_ ABSL_GUARDED_BY(mutex_) = 0;  // in the ring
  int64_t complete_before_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t barriers_ ABSL_GUARDED_BY(mutex_) = 0;
  bool in_barrier_ ABSL_GUARDED_BY(mutex_) = false;
};

// Looks for the first collective that two ranks launched differently. Where there is none, looks
// for a rank that cannot launch collective `awaited`, for which rank `asker` waits, because that
// rank waits for `asker` in a monitored barrier. Returns an empty text when both searches fail.
// Otherwise returns the error text for all ranks: the place of each rank, and the remedy.
std::string DescribeMismatch(const std::map<int, RankPosition>& positions, int asker,
                             int64_t awaited);

}  // namespace ddp::internal

#endif  // DDP_COMM_COLLECTIVE_LOG_H_
