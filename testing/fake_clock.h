#ifndef DDP_TESTING_FAKE_CLOCK_H_
#define DDP_TESTING_FAKE_CLOCK_H_

#include <glog/logging.h>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace ddp::testing {

// A clock that changes only when the test calls Advance(). It starts at an arbitrary time, neither
// zero nor infinite. So a test fails when code treats zero or infinity as "unset".
//
// Thread-safe.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::FromUnixSeconds(1'000'000)) : now_(start) {}

  absl::Time Now() const override {
    MutexLock lock(mutex_);
    return now_;
  }

  // Moves the clock. A negative duration is a mistake of the test: CHECK.
  void Advance(absl::Duration duration) {
    CHECK_GE(absl::ToInt64Nanoseconds(duration), 0) << "a clock does not go back";
    MutexLock lock(mutex_);
    now_ += duration;
  }

 private:
  mutable Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FAKE_CLOCK_H_
