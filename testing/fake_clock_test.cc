#include "testing/fake_clock.h"

#include <gtest/gtest.h>

namespace ddp::testing {
namespace {

TEST(FakeClockTest, StandsStillUntilItIsMoved) {
  FakeClock clock;
  const absl::Time start = clock.Now();
  EXPECT_EQ(clock.Now(), start);
  clock.Advance(absl::Seconds(3));
  EXPECT_EQ(clock.Now() - start, absl::Seconds(3));
}

TEST(FakeClockTest, StartsWhereItIsTold) {
  const absl::Time start = absl::FromUnixSeconds(42);
  EXPECT_EQ(FakeClock(start).Now(), start);
}

TEST(FakeClockDeathTest, DoesNotGoBack) {
  FakeClock clock;
  EXPECT_DEATH(clock.Advance(absl::Seconds(-1)), "does not go back");
}

}  // namespace
}  // namespace ddp::testing
