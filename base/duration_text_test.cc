#include "base/duration_text.h"

#include <gtest/gtest.h>

namespace ddp {
namespace {

TEST(DurationTextTest, IsForPeople) {
  EXPECT_EQ(DurationText(absl::ZeroDuration()), "1ms");
  EXPECT_EQ(DurationText(absl::Nanoseconds(5)), "1ms");
  EXPECT_EQ(DurationText(absl::Microseconds(12'600)), "13ms");
  EXPECT_EQ(DurationText(absl::Microseconds(999'700)), "1s");
  EXPECT_EQ(DurationText(absl::Milliseconds(1'999)), "2s");
  EXPECT_EQ(DurationText(absl::Milliseconds(1'449)), "1.4s");
  EXPECT_EQ(DurationText(absl::Milliseconds(59'700)), "1m");
  EXPECT_EQ(DurationText(absl::Nanoseconds(599'201'235'737)), "9m59s");
  EXPECT_EQ(DurationText(absl::Minutes(10)), "10m");
  EXPECT_EQ(DurationText(-absl::Seconds(2)), "-2s");
  EXPECT_EQ(DurationText(absl::InfiniteDuration()), "inf");
}

}  // namespace
}  // namespace ddp
