#ifndef DDP_COMM_CHECK_COLLECTIVE_LOG_H_
#define DDP_COMM_CHECK_COLLECTIVE_LOG_H_

#include <cstdint>
#include <deque>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "ddp/comm/check/collective_record.h"
#include "ddp/comm/check/operation_name.h"
#include "ddp/comm/reports/failure_monitor.h"

namespace ddp::internal {

// A collective as a rank launches it: the properties that must be equal on all ranks. A monitored
// barrier counts as one, without a type.
struct CollectiveCall {
  const char* operation = "";  // a literal: "all-reduce (sum)"
  const char* dtype = "";      // a literal: "Float"
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t root = -1;  // rank, of a broadcast; -1 for other operations
  bool sparse = false;
  OperationName what = "";  // "the all-reduce of gradient bucket 3"
};

// Numbers and records the collectives that a communicator launches, and gives each a tag. Different
// collectives have different tags (for exceptions see Add()), so a backend that matches messages by
// tag does not match two collectives of different sizes. LibTorch's Gloo would end the process for
// such a match. The Communicator owns the log. The thread "ddp-failure" reads it to answer peers.
//
// Cost per collective: a hash of a few words and a lock, which is rarely contended. Thread-safe.
class CollectiveLog : public PositionSource {
 public:
  // Records the next collective and returns its tag. The low 12 bits are the sequence number modulo
  // 4096; the bits above are a hash of the sequence number and the call. On one rank, up to 4096
  // consecutive collectives have different tags. On two ranks, different collectives with the same
  // low bits share a tag in 1 of 2^20 cases.
  uint32_t Add(CollectiveCall call);

  // Records that all collectives before `sequence` are complete on this rank.
  void SetCompleteBefore(int64_t sequence);

  // Returns the number of collectives launched so far.
  int64_t launched() const override;

  // Returns this rank's position. It shows at most 72 collectives: 8 before the oldest one that is
  // not complete, and 64 from there on. It shows a meeting of the workers of remote calls when the
  // thread that launched the newest collective waits there.
  RankPosition Position() const;
  std::string Answer() const override { return Position().Serialize(); }

 private:
  struct Entry {
    uint64_t fingerprint = 0;
    CollectiveCall call;
  };

  mutable Mutex mutex_;
  // The newest collectives, by sequence: all that are not complete, and the few before that a
  // position shows.
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t launched_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread::id launcher_ ABSL_GUARDED_BY(mutex_);  // of the newest collective
  int64_t complete_before_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_COLLECTIVE_LOG_H_
