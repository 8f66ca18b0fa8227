#include "elastic/data/index_permutation.h"

#include <cmath>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

std::vector<int64_t> Order(int64_t size, IndexPermutation::Key key) {
  const IndexPermutation permutation(size, key);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < size; ++i) order.push_back(permutation(i));
  return order;
}

TEST(IndexPermutationTest, IsABijectionForEverySmallSize) {
  for (int64_t size = 1; size <= 300; ++size) {
    const std::vector<int64_t> order = Order(size, {.seed = 5, .epoch = 2});
    const std::set<int64_t> seen(order.begin(), order.end());
    ASSERT_EQ(seen.size(), static_cast<size_t>(size));
    ASSERT_EQ(*seen.begin(), 0);
    ASSERT_EQ(*seen.rbegin(), size - 1);
  }
}

TEST(IndexPermutationTest, IsABijectionAroundPowersOfTwo) {
  for (const int64_t size : {4095, 4096, 4097, 16385, 65535, 65537}) {
    std::vector<bool> seen(static_cast<size_t>(size), false);
    for (const int64_t index : Order(size, {.seed = 9, .epoch = 0})) {
      ASSERT_FALSE(seen[static_cast<size_t>(index)]) << index << " of " << size;
      seen[static_cast<size_t>(index)] = true;
    }
  }
}

TEST(IndexPermutationTest, SeedAndEpochAreNotInterchangeable) {
  const std::set<std::vector<int64_t>> orders = {
      Order(100, {.seed = 0, .epoch = 0}), Order(100, {.seed = 0, .epoch = 1}),
      Order(100, {.seed = 1, .epoch = 0}), Order(100, {.seed = 1, .epoch = 1}),
      Order(100, {.seed = uint64_t{1} << 32, .epoch = 0})};
  EXPECT_EQ(orders.size(), 5u);
}

// The order is a format: a checkpoint of today must select the same samples in every later version.
TEST(IndexPermutationTest, OrderNeverChanges) {
  EXPECT_THAT(Order(10, {.seed = 42, .epoch = 3}),
              ::testing::ElementsAre(9, 8, 7, 0, 4, 1, 2, 3, 6, 5));
}

TEST(IndexPermutationTest, WorksBeyondFourBillion) {
  const int64_t size = (int64_t{1} << 40) + 7;
  const IndexPermutation permutation(size, {.seed = 1, .epoch = 1});
  std::set<int64_t> seen;
  int64_t above_four_billion = 0;
  for (int64_t i = 0; i < 10000; ++i) {
    const int64_t index = permutation(size - 1 - i);
    ASSERT_GE(index, 0);
    ASSERT_LT(index, size);
    ASSERT_TRUE(seen.insert(index).second);
    if (index > (int64_t{1} << 32)) ++above_four_billion;
  }
  EXPECT_GT(above_four_billion, 9000);
}

// Over many keys, the image of the first index must be uniform: chi-square with 19 degrees of
// freedom, whose 99.9 % point is 43.8. The keys are fixed, so the result is always the same.
TEST(IndexPermutationTest, FirstPositionIsUniform) {
  constexpr int kSize = 20;
  constexpr int kKeys = 20000;
  for (const int64_t position : {0, 1, 10, 19}) {
    std::vector<int> counts(kSize, 0);
    for (int key = 0; key < kKeys; ++key) {
      const IndexPermutation permutation(
          kSize, {.seed = static_cast<uint64_t>(key / 4), .epoch = static_cast<uint32_t>(key % 4)});
      ++counts[static_cast<size_t>(permutation(position))];
    }
    double chi_square = 0;
    const double expected = static_cast<double>(kKeys) / kSize;
    for (const int count : counts) chi_square += std::pow(count - expected, 2) / expected;
    EXPECT_LT(chi_square, 43.8) << "position " << position;
  }
}

// Neighbours must not stay neighbours: the mean distance of two random numbers of [0, N) is N / 3.
TEST(IndexPermutationTest, NeighboursAreScattered) {
  const std::vector<int64_t> order = Order(10007, {.seed = 3, .epoch = 4});
  double sum = 0;
  for (size_t i = 1; i < order.size(); ++i) sum += std::abs(order[i] - order[i - 1]);
  const double mean = sum / static_cast<double>(order.size() - 1);
  EXPECT_NEAR(mean / 10007, 1.0 / 3, 0.01);
}

TEST(IndexPermutationDeathTest, RefusesWhatIsOutside) {
  const IndexPermutation permutation(5, {});
  EXPECT_DEATH(permutation(5), "index 5 is outside");
  EXPECT_DEATH(permutation(-1), "index -1 is outside");
}

}  // namespace
}  // namespace ddp::elastic
