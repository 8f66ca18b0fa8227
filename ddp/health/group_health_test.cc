#include "ddp/health/group_health.h"

#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {
namespace {

using Kind = GroupError::Kind;
using Forward = GroupHealth::Forward;

// Rank 1 of a group, in incarnation 0.
class GroupHealthTest : public ::testing::Test {
 protected:
  void Begin(int64_t incarnation) {
    health_.Begin({.rank = 1, .size = 4, .incarnation = incarnation});
  }

  // Rank 2 has reported a failure.
  void FailPeer() { EXPECT_TRUE(health_.OnFailure(0, {.rank = 2, .reason = "disk full"})); }

  GroupHealth health_{Membership{.rank = 1, .size = 4}};
};

TEST_F(GroupHealthTest, IsUsableWithoutAFailure) {
  std::optional<GroupError> error;
  EXPECT_EQ(health_.OnUse(false, "a barrier"), std::nullopt);
  EXPECT_EQ(health_.OnForward(&error), Forward::kGoesOn);
  EXPECT_EQ(health_.GoneError(), std::nullopt);
  EXPECT_FALSE(health_.failed());
}

TEST_F(GroupHealthTest, KeepsTheFirstFailureOfAnIncarnation) {
  FailPeer();
  EXPECT_FALSE(health_.OnFailure(0, {.rank = 0, .reason = "broken pipe"}));
  EXPECT_EQ(health_.failure()->ToString(), "rank 2 failed: disk full");
}

TEST_F(GroupHealthTest, IgnoresEarlierIncarnationsAndKeepsLaterOnes) {
  EXPECT_FALSE(health_.OnFailure(2, {.rank = 0, .reason = "later"}));
  EXPECT_FALSE(health_.OnFailure(2, {.rank = 3, .reason = "later still"}));
  EXPECT_FALSE(health_.failed());
  Begin(1);
  EXPECT_FALSE(health_.OnFailure(0, {.rank = 2, .reason = "old"}));
  EXPECT_FALSE(health_.failed());
  Begin(2);
  EXPECT_EQ(health_.failure()->reason, "later");
  Begin(3);
  EXPECT_FALSE(health_.failed());
}

TEST_F(GroupHealthTest, AnOperationThatFailsNamesThePeerAtFault) {
  FailPeer();
  const GroupError error = health_.OnOperationFailed("the barrier", "connection reset");
  EXPECT_EQ(error.kind, Kind::kPeerFailed);
  EXPECT_EQ(error.peer, 2);
  EXPECT_FALSE(error.is_cause);
  EXPECT_EQ(error.message, "rank 1: stopped in the barrier, because rank 2 failed: disk full");
}

TEST_F(GroupHealthTest, AnOperationThatFailsWithoutAKnownFailureIsTheCause) {
  const GroupError error = health_.OnOperationFailed("the barrier", "connection reset");
  EXPECT_EQ(error.kind, Kind::kCommunication);
  EXPECT_TRUE(error.is_cause);
  EXPECT_EQ(error.message, "rank 1: the barrier failed: connection reset");
}

TEST_F(GroupHealthTest, AFailureOfThisRankIsNotReplacedByItsConsequence) {
  EXPECT_TRUE(health_.OnFailure(0, {.rank = 1, .reason = "disk full"}));
  const GroupError error = health_.OnOperationFailed("the barrier", "connection reset");
  EXPECT_EQ(error.kind, Kind::kCommunication);
  EXPECT_EQ(error.message, "rank 1: the barrier failed: disk full");
}

TEST_F(GroupHealthTest, NoRankAloneIsAtFaultWhenTheRanksDisagree) {
  EXPECT_TRUE(health_.OnFailure(0, {.rank = -1, .reason = "the ranks differ"}));
  const GroupError error = health_.OnOperationFailed("the barrier", "connection reset");
  EXPECT_EQ(error.kind, Kind::kCommunication);
  EXPECT_EQ(error.peer, -1);
  EXPECT_FALSE(error.is_cause);
  EXPECT_EQ(error.message, "rank 1: stopped in the barrier: the ranks differ");
}

TEST_F(GroupHealthTest, TheNextUseThrowsTheFailureAndFurtherUsesNeedARenewal) {
  FailPeer();
  EXPECT_EQ(health_.OnUse(false, "a broadcast")->message,
            "rank 1: stopped in a broadcast, because rank 2 failed: disk full");
  const std::optional<GroupError> again = health_.OnUse(true, "a broadcast");
  EXPECT_EQ(again->kind, Kind::kPeerFailed);
  EXPECT_EQ(again->message,
            "rank 1: the process group cannot be used any more, until all ranks renew it (the next "
            "synchronized forward does, or ProcessGroup::renew()): rank 2 failed: disk full");
}

TEST_F(GroupHealthTest, ARetiredCommunicatorIsNotUsedEvenWithoutAKnownFailure) {
  const std::optional<GroupError> error = health_.OnUse(true, "a broadcast");
  EXPECT_EQ(error->kind, Kind::kCommunication);
  EXPECT_EQ(error->message,
            "rank 1: the process group cannot be used any more, until all ranks renew it (the next "
            "synchronized forward does, or ProcessGroup::renew()): an operation failed");
}

TEST_F(GroupHealthTest, AForwardThrowsOnceAndThenRenews) {
  FailPeer();
  std::optional<GroupError> error;
  EXPECT_EQ(health_.OnForward(&error), Forward::kThrows);
  EXPECT_EQ(error->message, "rank 1: rank 2 failed since this rank's last collective: disk full");
  EXPECT_EQ(health_.OnForward(&error), Forward::kRenews);
  Begin(1);
  EXPECT_EQ(health_.OnForward(&error), Forward::kGoesOn);
  EXPECT_TRUE(health_.OnFailure(1, {.rank = -1, .reason = "the ranks differ"}));
  EXPECT_EQ(health_.OnForward(&error), Forward::kThrows) << "the failure is another one";
  EXPECT_EQ(error->kind, Kind::kCommunication);
  EXPECT_EQ(error->message,
            "rank 1: the ranks failed since this rank's last collective: the ranks differ");
}

TEST_F(GroupHealthTest, AFailureThatWasRaisedNeedsARenewalAlsoWithAnotherCommunicator) {
  EXPECT_TRUE(health_.OnFailure(0, {.rank = 1, .reason = "disk full"}));
  EXPECT_FALSE(health_.Raise());
  const std::optional<GroupError> error = health_.OnUse(false, "a broadcast");
  EXPECT_EQ(error->kind, Kind::kCommunication);
  EXPECT_EQ(error->message,
            "rank 1: the process group cannot be used any more, until all ranks renew it (the next "
            "synchronized forward does, or ProcessGroup::renew()): rank 1 failed: disk full");
}

TEST_F(GroupHealthTest, AForwardRenewsAtOnceAfterAnOperationHasThrown) {
  FailPeer();
  (void)health_.OnOperationFailed("the barrier", "");
  std::optional<GroupError> error;
  EXPECT_EQ(health_.OnForward(&error), Forward::kRenews);
}

TEST_F(GroupHealthTest, AForwardThrowsThisRanksOwnReportAsAReductionError) {
  EXPECT_TRUE(health_.OnFailure(0, {.rank = 1, .reason = "left the scope of a Join"}));
  std::optional<GroupError> error;
  EXPECT_EQ(health_.OnForward(&error), Forward::kThrows);
  EXPECT_EQ(error->kind, Kind::kReduction);
  EXPECT_EQ(error->message, "left the scope of a Join");
  EXPECT_FALSE(error->is_cause);
}

TEST_F(GroupHealthTest, AForwardThrowsAnOperationThatNoCallAwaitedAsACommunicationError) {
  std::optional<GroupError> error;
  health_.OnOperation();
  EXPECT_TRUE(health_.OnFailure(0, {.rank = 1, .reason = "the broadcast failed"}));
  EXPECT_EQ(health_.OnForward(&error), Forward::kThrows);
  EXPECT_EQ(error->kind, Kind::kCommunication);
  EXPECT_EQ(error->message, "the broadcast failed");
}

TEST_F(GroupHealthTest, AnErrorOfTheProgramIsReportedAndRaised) {
  const GroupError error = health_.OnOwnError(Kind::kReduction, "rank 1: the hook failed");
  EXPECT_EQ(error.kind, Kind::kReduction);
  EXPECT_TRUE(error.is_cause);
  EXPECT_TRUE(health_.Raise()) << "it was raised already";
}

TEST_F(GroupHealthTest, AFailureEndsAWaitForTheOtherRanks) {
  FailPeer();
  const GroupError error = health_.OnWaitEnded("a monitored barrier");
  EXPECT_EQ(error.kind, Kind::kPeerFailed);
  EXPECT_EQ(error.message,
            "rank 1: stopped in a monitored barrier, because rank 2 failed: disk full");
}

TEST_F(GroupHealthTest, AGroupWithARankThatIsGoneIsNeverUsableAgain) {
  FailPeer();
  health_.OnGone({.rank = 2, .reason = "its process has ended"});
  health_.OnGone({.rank = 3, .reason = "later"});
  const std::string text =
      "rank 1: the process group cannot be used any more, because rank 2 is gone: its process has "
      "ended";
  std::optional<GroupError> error;
  EXPECT_EQ(health_.OnForward(&error), Forward::kThrows);
  EXPECT_EQ(error->message, text);
  EXPECT_EQ(health_.OnUse(false, "a barrier")->message, text);
  EXPECT_EQ(health_.OnUse(true, "a barrier")->message, text);
  EXPECT_EQ(health_.GoneError()->peer, 2);
  Begin(1);
  EXPECT_EQ(health_.GoneError()->message, text);
}

// After a rank was lost, another number may be this rank's: messages name the new one.
TEST_F(GroupHealthTest, AnIncarnationMayHaveOtherMembers) {
  health_.Begin({.rank = 0, .size = 1, .incarnation = 1});
  EXPECT_EQ(health_.OnOperationFailed("a barrier", "no route").message,
            "rank 0: a barrier failed: no route");
}

}  // namespace
}  // namespace ddp::internal
