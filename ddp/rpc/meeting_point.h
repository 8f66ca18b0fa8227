#ifndef DDP_RPC_MEETING_POINT_H_
#define DDP_RPC_MEETING_POINT_H_

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "base/mutex.h"
#include "ddp/rpc/value.h"

namespace ddp::rpc::internal {

// The answers of functions, for Transport::Receive(): (true, value), or (false, rank of a worker
// that failed or -1, message, stack).
inline c10::IValue Returned(c10::IValue value) {
  return c10::ivalue::Tuple::create(c10::IValue(true), std::move(value));
}
inline c10::IValue Failed(int rank, const std::string& message, const std::string& stack) {
  return Value<std::tuple<bool, int, std::string, std::string>>::To({false, rank, message, stack});
}

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
  FuturePtr Arrive(Meeting meeting, const std::string& worker, int size) {
    auto mine = c10::make_intrusive<Future>(c10::AnyType::get());
    std::vector<FuturePtr> all;
    c10::IValue answer = Returned(c10::IValue());
    {
      MutexLock lock(mutex_);
      if (arrived_.empty()) {
        meeting_ = meeting;
        first_ = worker;
      } else if (meeting != meeting_ && mixed_.empty()) {
        mixed_ = "worker " + first_ + " is in " + NameOf(meeting_) + " while worker " + worker +
                 " is in " + NameOf(meeting) + ": all workers must call them in the same order";
      }
      arrived_.push_back(mine);
      if (!mixed_.empty()) answer = Failed(-1, mixed_, mixed_);
      if (!mixed_.empty() || static_cast<int>(arrived_.size()) == size) all.swap(arrived_);
    }
    for (const FuturePtr& future : all) future->markCompleted(answer);
    return mine;
  }

  // Returns the future of the answer to a worker that watches this one: it comes with EndWatches().
  FuturePtr AddWatcher() {
    auto watcher = c10::make_intrusive<Future>(c10::AnyType::get());
    bool ended = false;
    {
      MutexLock lock(mutex_);
      ended = watches_ended_;
      if (!ended) watchers_.push_back(watcher);
    }
    if (ended) watcher->markCompleted(Returned(c10::IValue()));
    return watcher;
  }

  void EndWatches() {
    std::vector<FuturePtr> watchers;
    {
      MutexLock lock(mutex_);
      watches_ended_ = true;
      watchers.swap(watchers_);
    }
    for (const FuturePtr& watcher : watchers) watcher->markCompleted(Returned(c10::IValue()));
  }

 private:
  static std::string NameOf(Meeting meeting) {
    switch (meeting) {
      case Meeting::kInit:
        return "init()";
      case Meeting::kBarrier:
        return "barrier()";
      case Meeting::kShutdown:
        return "shutdown()";
      case Meeting::kEnd:
        return "the end of shutdown()";
    }
    return "";
  }

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
