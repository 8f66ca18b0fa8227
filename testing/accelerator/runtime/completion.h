#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_COMPLETION_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_COMPLETION_H_

#include <functional>
#include <utility>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace ddp::testing {

// A point of a stream's work that the stream has not reached yet, or has. Thread-safe.
class Completion {
 public:
  // `hurry` is called by waits, until Complete(): it makes the stream run without lateness up to
  // this point.
  explicit Completion(std::function<void()> hurry) : hurry_(std::move(hurry)) {}

  void Complete() {
    MutexLock lock(mutex_);
    done_ = true;
    time_ = MonotonicClock().Now();
    hurry_ = nullptr;
    changed_.NotifyAll();
  }

  bool done() const {
    MutexLock lock(mutex_);
    return done_;
  }

  // Returns when the stream reached the point. Requires: done().
  absl::Time time() const {
    MutexLock lock(mutex_);
    return time_;
  }

  void Hurry() {
    std::function<void()> hurry;
    {
      MutexLock lock(mutex_);
      hurry = hurry_;
    }
    if (hurry) hurry();
  }

  // Blocks until Complete(). No deadline: the device's work ends, or its collective is aborted.
  void Wait() {
    MutexLock lock(mutex_);
    while (!done_) changed_.WaitFor(mutex_, absl::InfiniteDuration());
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  std::function<void()> hurry_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time time_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_COMPLETION_H_
