#include "ddp/common/name_list.h"

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(NameListTest, CountsWhatIsBeyondTheLimit) {
  EXPECT_EQ(NameList({"a"}), "a");
  EXPECT_EQ(NameList({"a", "b", "c"}, 3), "a, b, c");
  EXPECT_EQ(NameList({"a", "b", "c", "d"}, 2), "a, b and 2 more");
}

TEST(RankListTest, ReadsAsText) {
  EXPECT_EQ(RankList({1}), "rank 1");
  EXPECT_EQ(RankList({1, 3}), "ranks 1, 3");
}

}  // namespace
}  // namespace ddp::internal
