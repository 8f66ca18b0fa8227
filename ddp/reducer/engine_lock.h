#ifndef DDP_REDUCER_ENGINE_LOCK_H_
#define DDP_REDUCER_ENGINE_LOCK_H_

#include <atomic>
#include <thread>

#include "base/mutex.h"

namespace ddp::internal {

// Guards the state of a reducer against autograd's threads. The backward of a model on the CPU runs
// on the thread that calls it. A device has a thread of its own, beside which the calling thread
// runs the operations of the CPU, and on which a backward ends that has thrown. So the lock is one
// only after Enable(); before that, it costs the read of a flag for each gradient. Recursive.
class EngineLock {
 public:
  class Scope {
   public:
    explicit Scope(EngineLock& lock) : lock_(lock.enabled() ? &lock : nullptr) {
      if (lock_ != nullptr) lock_->Enter();
    }
    ~Scope() {
      if (lock_ != nullptr) lock_->Leave();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    EngineLock* const lock_;
  };

  // Call it while no backward runs.
  void Enable() { enabled_.store(true, std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

 private:
  void Enter() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (owner_ != std::this_thread::get_id()) {
      mutex_.Lock();
      owner_ = std::this_thread::get_id();
    }
    ++depth_;
  }
  void Leave() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (--depth_ > 0) return;
    owner_ = std::thread::id();
    mutex_.Unlock();
  }

  std::atomic<bool> enabled_ = false;
  Mutex mutex_;
  std::atomic<std::thread::id> owner_{};  // this thread's number while it holds the mutex
  int depth_ = 0;                         // of the owner
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_ENGINE_LOCK_H_
