#include "ddp/comm/backend/rank_device.h"

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(RankDeviceTest, EachRankOfAHostTakesItsOwn) {
  for (int local_rank = 0; local_rank < 8; ++local_rank) {
    EXPECT_EQ(RankDevice(local_rank, /*visible=*/8), local_rank);
  }
}

TEST(RankDeviceTest, TheOnlyVisibleDeviceIsNumberZeroForEveryRank) {
  for (int local_rank = 0; local_rank < 8; ++local_rank) {
    EXPECT_EQ(RankDevice(local_rank, /*visible=*/1), 0);
  }
}

TEST(RankDeviceTest, RanksThatSeeHalfOfTheDevicesCountFromZero) {
  EXPECT_EQ(RankDevice(/*local_rank=*/3, /*visible=*/4), 3);
  EXPECT_EQ(RankDevice(/*local_rank=*/5, /*visible=*/4), 1);
}

TEST(RankDeviceTest, WithoutADeviceTheErrorNamesTheRanksOwn) {
  EXPECT_EQ(RankDevice(/*local_rank=*/3, /*visible=*/0), 3);
}

}  // namespace
}  // namespace ddp::internal
