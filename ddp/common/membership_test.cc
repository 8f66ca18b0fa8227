#include "ddp/common/membership.h"

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(MembershipTest, RanksOfOneHostAreConsecutive) {
  Membership member{.rank = 5, .size = 8, .local_rank = 1};
  member.SetLocalRanks(4);
  EXPECT_FALSE(member.IsOnThisHost(3));
  EXPECT_TRUE(member.IsOnThisHost(4));
  EXPECT_TRUE(member.IsOnThisHost(7));
  EXPECT_FALSE(member.IsOneHost());
}

TEST(MembershipTest, OneHostHasAllRanksWhateverTheLocalRank) {
  Membership member{.rank = 1, .size = 2, .local_rank = 0};
  member.SetLocalRanks(2);
  EXPECT_TRUE(member.IsOneHost());
  EXPECT_TRUE(member.IsOnThisHost(0));
}

TEST(MembershipTest, ContradictionsLeaveTheHostUnknown) {
  Membership member{.rank = 1, .size = 8, .local_rank = 3};
  member.SetLocalRanks(4);  // begins below rank 0
  EXPECT_FALSE(member.IsOnThisHost(1));
  member = {.rank = 7, .size = 8, .local_rank = 0};
  member.SetLocalRanks(4);  // ends above rank 7
  EXPECT_FALSE(member.IsOnThisHost(7));
  member.SetLocalRanks(0);
  EXPECT_FALSE(member.IsOnThisHost(7));
  EXPECT_FALSE(member.IsOneHost());
}

TEST(MembershipTest, TheNextIncarnationHasTheSameRanks) {
  const Membership first{.rank = 1, .size = 2, .incarnation = 4, .store_is_rank_0 = true};
  Membership next = first.Next();
  EXPECT_EQ(next.incarnation, 5);
  next.incarnation = 4;
  EXPECT_EQ(next, first);
}

}  // namespace
}  // namespace ddp::internal
