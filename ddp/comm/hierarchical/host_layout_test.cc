#include "ddp/comm/hierarchical/host_layout.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::Optional;

TEST(HostLayoutTest, MembersOfEqualHostsMeetByTheirNumbers) {
  const HostLayout layout({{0, 2}, {2, 4}, {4, 6}}, 3);
  EXPECT_EQ(layout.host(), 1);
  EXPECT_EQ(layout.member(), 1);
  EXPECT_EQ(layout.CourierOf(0, 3), 1);
  EXPECT_EQ(layout.CourierOf(2, 2), 4);
  EXPECT_EQ(layout.HostOf(5), 2);
}

TEST(HostLayoutTest, HostsComeFromWhatTheRanksKnow) {
  const RankRange one{0, 2};
  const RankRange other{2, 3};
  EXPECT_THAT(HostsFrom(std::vector{one, one, other}), Optional(ElementsAre(one, other)));
  EXPECT_EQ(HostsFrom(std::vector{one, other, other}), std::nullopt);
  EXPECT_EQ(HostsFrom(std::vector{one, one, RankRange{}}), std::nullopt);
  EXPECT_EQ(HostsFrom(std::vector{one, one, RankRange{2, 4}}), std::nullopt);
  EXPECT_EQ(HostsFrom(std::vector{one, one, RankRange{1, 3}}), std::nullopt);
  EXPECT_EQ(HostsFrom({}), std::nullopt);
}

TEST(HostLayoutTest, EveryRankHasACourierOnEachHost) {
  const HostLayout layout({{0, 2}, {2, 6}, {6, 7}}, 0);
  const auto couriers = [&](int host) {
    std::vector<int> ranks;
    for (int rank = 0; rank < layout.ranks(); ++rank) ranks.push_back(layout.CourierOf(host, rank));
    return ranks;
  };
  EXPECT_EQ(couriers(0), (std::vector<int>{0, 1, 0, 0, 1, 1, 0}));
  EXPECT_EQ(couriers(1), (std::vector<int>{2, 4, 2, 3, 4, 5, 2}));
  EXPECT_EQ(couriers(2), (std::vector<int>{6, 6, 6, 6, 6, 6, 6}));
}

}  // namespace
}  // namespace ddp::internal
