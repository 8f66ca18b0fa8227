#include "ddp/comm/arena/free_ranges.h"

#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace ddp::internal {
namespace {

TEST(FreeRangesTest, TakesTheLowestRangeThatIsLargeEnough) {
  FreeRanges ranges;
  ranges.Add({.offset = 0, .bytes = 10});
  ranges.Add({.offset = 100, .bytes = 50});
  ranges.Add({.offset = 200, .bytes = 50});
  EXPECT_EQ(ranges.Take(20), 100);
  EXPECT_EQ(ranges.Take(30), 120);  // the rest of the same range, whole
  EXPECT_EQ(ranges.Take(30), 200);
  EXPECT_EQ(ranges.Take(10), 0);
  EXPECT_EQ(ranges.Take(30), std::nullopt);
  EXPECT_EQ(ranges.Take(20), 230);
}

TEST(FreeRangesTest, NeighboursBecomeOneRange) {
  FreeRanges ranges;
  ranges.Add({.offset = 0, .bytes = 10});
  ranges.Add({.offset = 20, .bytes = 10});
  ranges.Add({.offset = 40, .bytes = 10});
  EXPECT_EQ(ranges.Take(11), std::nullopt);
  ranges.Add({.offset = 10, .bytes = 10});  // between two ranges
  EXPECT_EQ(ranges.Take(30), 0);
  ranges.Add({.offset = 30, .bytes = 10});  // below a range
  EXPECT_EQ(ranges.Take(20), 30);
}

TEST(FreeRangesTest, RandomUseLosesNoByteAndGivesNoneTwice) {
  constexpr uint64_t kBytes = 1000;
  FreeRanges ranges;
  ranges.Add({.offset = 0, .bytes = kBytes});
  std::vector<bool> taken(kBytes);
  std::vector<ArenaRange> held;
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0) {
      const uint64_t bytes = 1 + random() % 60;
      if (const auto offset = ranges.Take(bytes)) {
        for (uint64_t b = *offset; b < *offset + bytes; ++b) {
          ASSERT_FALSE(taken.at(b));
          taken[b] = true;
        }
        held.push_back({.offset = *offset, .bytes = bytes});
      }
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const ArenaRange range = held.back();
      held.pop_back();
      for (uint64_t b = range.offset; b < range.offset + range.bytes; ++b) taken[b] = false;
      ranges.Add(range);
    }
  }
  for (const ArenaRange& range : held) ranges.Add(range);
  EXPECT_EQ(ranges.Take(kBytes), 0);
}

TEST(FreeRangesDeathTest, ARangeIsNotAddedTwice) {
  FreeRanges ranges;
  ranges.Add({.offset = 10, .bytes = 10});
  EXPECT_DEATH(ranges.Add({.offset = 5, .bytes = 6}), "unused already");
  EXPECT_DEATH(ranges.Add({.offset = 19, .bytes = 6}), "unused already");
}

}  // namespace
}  // namespace ddp::internal
