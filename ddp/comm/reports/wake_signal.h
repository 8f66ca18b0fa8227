#ifndef DDP_COMM_REPORTS_WAKE_SIGNAL_H_
#define DDP_COMM_REPORTS_WAKE_SIGNAL_H_

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace ddp::internal {

// Wakes threads that wait for a condition over atomic state. Callbacks of futures share ownership
// of the signal, because they may run after the group has ended. Thread-safe.
class WakeSignal {
 public:
  // Wakes all waiting threads; each checks its condition again. Call it after the state has
  // changed.
  void Notify() {
    MutexLock lock(mutex_);
    changed_.NotifyAll();
  }

  // Blocks until `ready()` is true or `timeout` has passed. Returns the last value of `ready()`.
  // `ready` runs under the signal's lock: it may read atomic state only, and must take no lock.
  template <typename Ready>
  bool Wait(const Ready& ready, absl::Duration timeout) {
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + timeout;
    MutexLock lock(mutex_);
    while (!ready()) {
      const absl::Duration left = deadline - clock.Now();
      if (left <= absl::ZeroDuration()) return false;
      changed_.WaitFor(mutex_, left);
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_WAKE_SIGNAL_H_
