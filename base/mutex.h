// Locks that clang's thread-safety analysis checks and that ThreadSanitizer understands.
//
// Thin over std::mutex: the annotations are the whole point. (The system's absl::Mutex is not
// instrumented, so ThreadSanitizer reports races where there are none.)
#ifndef DDP_BASE_MUTEX_H_
#define DDP_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/language.h"

namespace ddp {

class CondVar;

// Not recursive.
class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a Mutex for a scope.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits may wake without a reason: call them in a loop over the condition. Every wait has a
// deadline; there is no wait without one.
class CondVar {
 public:
  static constexpr absl::Duration kLongestWait = absl::Hours(24 * 365);

  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Returns false when `timeout` has passed. Holds `mutex` on return in both cases. A timeout
  // beyond kLongestWait, infinity included, is kLongestWait: the C++ library adds it to the present
  // time, which would overflow, and the wait would end at once.
  bool WaitFor(Mutex& mutex, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_for(
        lock, absl::ToChronoNanoseconds(timeout < kLongestWait ? timeout : kLongestWait));
    lock.release();
    return status == std::cv_status::no_timeout;
  }

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace ddp

#endif  // DDP_BASE_MUTEX_H_
