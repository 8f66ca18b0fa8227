// Locks that clang's thread-safety analysis checks and that ThreadSanitizer understands.
//
// They are std::mutex with annotations. (The system's absl::Mutex is not instrumented, so
// ThreadSanitizer reports races where there are none.)
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

// A mutex, not recursive.
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

// A condition variable. A wait may return without a notification, so call it in a loop that checks
// the condition. Every wait has a deadline.
class CondVar {
 public:
  static constexpr absl::Duration kLongestWait = absl::Hours(24 * 365);

  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Blocks until a notification or `timeout`. Returns false when `timeout` has passed. Holds
  // `mutex` on return in both cases. A longer timeout, infinity included, becomes kLongestWait: the
  // C++ library adds the timeout to the present time, and an overflow would end the wait at once.
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
