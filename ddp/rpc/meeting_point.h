#ifndef DDP_RPC_MEETING_POINT_H_
#define DDP_RPC_MEETING_POINT_H_

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace ddp::rpc::internal {

// The answers of functions, for Transport::Receive(): (true, value), or (false, rank of a worker
// that failed or -1, message, stack).
c10::IValue Returned(c10::IValue value);
c10::IValue Failed(int rank, const std::string& message, const std::string& stack);

// Where all workers come together. They must come to the same meetings in the same order.
enum class Meeting { kInit, kBarrier, kShutdown, kEnd };

// The calls whose answers come later, at one worker: of the workers that have come to a meeting,
// and of those that watch this one. Thread-safe.
class MeetingPoint {
 public:
  using Future = c10::ivalue::Future;
  using FuturePtr = c10::intrusive_ptr<Future>;

  // Returns the future of the answer to `worker`. All get theirs when `size` workers have come.
  // When two have come to different meetings, these and all later ones get an error with both
  // names.
  FuturePtr Arrive(Meeting meeting, const std::string& worker, int size);

  // Returns the future of the answer to a worker that watches this one: it comes with EndWatches().
  FuturePtr AddWatcher();

  void EndWatches();

 private:
  Mutex mutex_;
  Meeting meeting_ ABSL_GUARDED_BY(mutex_) = Meeting::kInit;
  std::string first_ ABSL_GUARDED_BY(mutex_);  // who has come first
  std::vector<FuturePtr> arrived_ ABSL_GUARDED_BY(mutex_);
  std::string mixed_ ABSL_GUARDED_BY(mutex_);  // the error; empty: none
  std::vector<FuturePtr> watchers_ ABSL_GUARDED_BY(mutex_);
  bool watches_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_MEETING_POINT_H_
