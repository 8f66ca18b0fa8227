#ifndef DDP_COMM_ARENA_DEFERRED_FREES_H_
#define DDP_COMM_ARENA_DEFERRED_FREES_H_

#include <sys/types.h>

#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace ddp::internal {

// Memory of this process that other processes may still read, after its owner and the owner's group
// have been destroyed. Thread-safe.
class DeferredFrees {
 public:
  // Returns the deferred frees of this process, which are never destroyed.
  static DeferredFrees& OfProcess();

  // Calls `free` when `unused()` is true: at once, or in a later call of Add() or Sweep(). Both
  // are short, and must not call this class.
  void Add(std::function<bool()> unused, std::function<void()> free);

  // Frees what has become unused. A forked child frees nothing: the memory is the parent's.
  void Sweep();

 private:
  struct Kept {
    std::function<bool()> unused;
    std::function<void()> free;
  };

  DeferredFrees();

  const pid_t process_;
  Mutex mutex_;
  std::vector<Kept> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ARENA_DEFERRED_FREES_H_
