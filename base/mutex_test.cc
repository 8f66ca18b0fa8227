#include "base/mutex.h"

#include <gtest/gtest.h>

#include <thread>

#include "absl/time/time.h"

namespace ddp {
namespace {

class CondVarTest : public ::testing::Test {
 protected:
  // Waits until another thread has set `set_`. Counts the waits that timed out.
  int TimeoutsUntilSet(absl::Duration timeout) {
    int timeouts = 0;
    MutexLock lock(mutex_);
    // The other thread takes the lock, so it sets `set_` only while this thread waits.
    std::thread setter([this] {
      MutexLock lock(mutex_);
      set_ = true;
      changed_.NotifyAll();
    });
    while (!set_) timeouts += changed_.WaitFor(mutex_, timeout) ? 0 : 1;
    mutex_.Unlock();
    setter.join();
    mutex_.Lock();
    return timeouts;
  }

  Mutex mutex_;
  CondVar changed_;
  bool set_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST_F(CondVarTest, AnInfiniteTimeoutDoesNotEndAtOnce) {
  EXPECT_EQ(TimeoutsUntilSet(absl::InfiniteDuration()), 0);
}

TEST_F(CondVarTest, ALongTimeoutDoesNotEndAtOnce) {
  EXPECT_EQ(TimeoutsUntilSet(absl::Hours(24 * 365 * 300)), 0);
}

TEST_F(CondVarTest, AShortTimeoutEnds) {
  MutexLock lock(mutex_);
  EXPECT_FALSE(changed_.WaitFor(mutex_, absl::Milliseconds(1)));
  EXPECT_FALSE(changed_.WaitFor(mutex_, -absl::InfiniteDuration()));
}

}  // namespace
}  // namespace ddp
