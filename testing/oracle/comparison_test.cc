#include "testing/oracle/comparison.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

TEST(ComparisonTest, CountsTheFloatsBetween) {
  EXPECT_EQ(UlpsBetween(1.0f, 1.0f), 0);
  EXPECT_EQ(UlpsBetween(1.0f, std::nextafter(1.0f, 2.0f)), 1);
  EXPECT_EQ(UlpsBetween(std::nextafter(1.0f, 0.0f), std::nextafter(1.0f, 2.0f)), 2);
  EXPECT_EQ(UlpsBetween(0.0f, -0.0f), 0);
  const float least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(UlpsBetween(least, -least), 2);
  EXPECT_EQ(UlpsBetween(1.0f, NAN), Difference::kNotComparable);
}

TEST(ComparisonTest, KeepsTheLargestOfEachMeasure) {
  const float ours[] = {1.0f, 2.5f, -8.0f};
  const float theirs[] = {1.0f, 2.0f, -8.5f};
  const Difference difference = CompareFloats(ours, theirs, 3);
  EXPECT_EQ(difference.absolute, 0.5);
  EXPECT_EQ(difference.relative, 0.25);
  EXPECT_EQ(difference.largest, 8.5);
  EXPECT_EQ(difference.ulps, 1 << 21);  // a quarter of an octave
}

TEST(ComparisonTest, AZeroThatShouldBeNoneIsFarOff) {
  const float zero = 0, one = 1;
  EXPECT_TRUE(std::isinf(CompareFloats(&one, &zero, 1).relative));
  EXPECT_EQ(CompareFloats(&zero, &zero, 1).relative, 0);
}

}  // namespace
}  // namespace ddp::testing
