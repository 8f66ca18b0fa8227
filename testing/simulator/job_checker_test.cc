#include "testing/simulator/job_checker.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/rendezvous/round.h"

namespace ddp::testing {
namespace {

using elastic::NodeOffer;
using elastic::Round;
using Cause = JobChecker::Cause;

const NodeOffer kOffer = {.nproc = 2};

// Returns a generation of nodes with two workers each, as the node with `group_rank` sees it.
Round MakeRound(uint64_t number, const std::string& nonce, int group_rank, int nodes) {
  Round round;
  round.generation = {number, nonce};
  round.placement.group_rank = group_rank;
  round.placement.group_world_size = nodes;
  round.placement.local_world_size = 2;
  round.placement.first_rank = 2 * group_rank;
  round.placement.world_size = 2 * nodes;
  round.placement.master_addr = "host-0";
  return round;
}

class JobCheckerTest : public ::testing::Test {
 protected:
  void Start(int node, const Round& round) {
    checker_.OnRound(node, round, kOffer, now_us_);
    for (int i = 0; i < 2; ++i) {
      checker_.OnWorkerStarted(node, round.generation, round.placement.first_rank + i, now_us_);
    }
  }
  void End(int node, const Round& round, Cause cause = Cause::kOther) {
    for (int i = 0; i < 2; ++i) {
      checker_.OnWorkerEnded(node, round.generation, round.placement.first_rank + i, cause,
                             now_us_);
    }
  }
  void StartBoth(uint64_t number, const std::string& nonce) {
    Start(0, MakeRound(number, nonce, 0, 2));
    Start(1, MakeRound(number, nonce, 1, 2));
  }
  void EndBoth(uint64_t number, const std::string& nonce, Cause cause) {
    End(0, MakeRound(number, nonce, 0, 2), cause);
    End(1, MakeRound(number, nonce, 1, 2));
  }
  bool Says(const std::string& part) {
    return absl::StrContains(checker_.violation().value_or("nothing"), part);
  }

  JobChecker checker_{{.min_nodes = 1, .max_nodes = 2, .max_restarts = 1, .fencing_us = 1000}};
  int64_t now_us_ = 0;
};

TEST_F(JobCheckerTest, AGoodJobIsGood) {
  StartBoth(1, "a");
  EndBoth(1, "a", Cause::kOwnFailure);
  for (int node = 0; node < 2; ++node) {
    Round round = MakeRound(2, "b", node, 2);
    round.restarts = 1;
    round.charged = true;
    Start(node, round);
  }
  EXPECT_EQ(checker_.violation(), std::nullopt);
  EXPECT_EQ(checker_.generations(), 2);
  EXPECT_EQ(checker_.charged(), 1);
}

TEST_F(JobCheckerTest, SeesTwoGenerationsAtOnce) {
  StartBoth(1, "a");
  now_us_ = 2000;
  Start(2, MakeRound(2, "b", 0, 1));
  EXPECT_TRUE(Says("run at once")) << *checker_.violation();
}

TEST_F(JobCheckerTest, ANodeThatCannotHearMayRunOn) {
  StartBoth(1, "a");
  checker_.OnContact(0, false, 10);
  checker_.OnContact(1, false, 10);
  now_us_ = 2000;
  Start(2, MakeRound(2, "b", 0, 1));
  EXPECT_EQ(checker_.violation(), std::nullopt);
}

TEST_F(JobCheckerTest, SeesAGenerationThatComesBack) {
  StartBoth(2, "a");
  EndBoth(2, "a", Cause::kOwnFailure);
  checker_.OnRound(0, MakeRound(1, "b", 0, 2), kOffer, now_us_);
  EXPECT_TRUE(Says("after generation 2.a"));
}

TEST_F(JobCheckerTest, SeesANumberTwice) {
  checker_.OnRound(0, MakeRound(1, "a", 0, 1), kOffer, now_us_);
  checker_.OnRound(1, MakeRound(1, "b", 0, 1), kOffer, now_us_);
  EXPECT_TRUE(Says("generation 1.b has the number of generation 1.a"));
}

TEST_F(JobCheckerTest, ANumberMayComeTwiceAfterTheStoreForgot) {
  checker_.OnRound(0, MakeRound(1, "a", 0, 1), kOffer, now_us_);
  checker_.OnStoreLostMemory(now_us_);
  checker_.OnRound(1, MakeRound(1, "b", 0, 1), kOffer, now_us_);
  EXPECT_EQ(checker_.violation(), std::nullopt);
}

TEST_F(JobCheckerTest, SeesARankTwice) {
  Start(0, MakeRound(1, "a", 0, 2));
  Start(1, MakeRound(1, "a", 0, 2));
  EXPECT_TRUE(Says("group rank 0 was given to node 0 and to node 1"));
}

TEST_F(JobCheckerTest, SeesRanksThatOverlapOrLeaveAHole) {
  Round round = MakeRound(1, "a", 1, 2);
  round.placement.first_rank = 1;
  checker_.OnRound(0, MakeRound(1, "a", 0, 2), kOffer, now_us_);
  checker_.OnRound(1, round, kOffer, now_us_);
  EXPECT_TRUE(Says("has ranks from 1, those before it end at 2"));
}

TEST_F(JobCheckerTest, SeesTwoOpinions) {
  Round other = MakeRound(1, "a", 1, 2);
  other.restarts = 1;
  checker_.OnRound(0, MakeRound(1, "a", 0, 2), kOffer, now_us_);
  checker_.OnRound(1, other, kOffer, now_us_);
  EXPECT_TRUE(Says("has 1 restarts for one and 0 for another"));
}

TEST_F(JobCheckerTest, SeesASurvivorMove) {
  StartBoth(1, "a");
  EndBoth(1, "a", Cause::kOwnFailure);
  checker_.OnDisturbance(now_us_);
  checker_.OnRound(0, MakeRound(2, "b", 1, 2), kOffer, now_us_);
  EXPECT_TRUE(Says("moves a node from group rank 0 to 1"));
}

TEST_F(JobCheckerTest, SeesAMembershipChangeCharged) {
  StartBoth(1, "a");
  checker_.OnDisturbance(now_us_);
  EndBoth(1, "a", Cause::kOther);
  Round round = MakeRound(2, "b", 0, 2);
  round.restarts = 1;
  round.charged = true;
  checker_.OnRound(0, round, kOffer, now_us_);
  EXPECT_TRUE(Says("a membership change was charged"));
}

TEST_F(JobCheckerTest, SeesAFailureForFree) {
  StartBoth(1, "a");
  EndBoth(1, "a", Cause::kOwnFailure);
  checker_.OnRound(0, MakeRound(2, "b", 0, 2), kOffer, now_us_);
  EXPECT_TRUE(Says("a failure was not charged"));
}

// A drain excuses failures after its first moments, and no other one.
TEST_F(JobCheckerTest, AFailureBeforeADrainExcusesIsCharged) {
  StartBoth(1, "a");
  checker_.OnDrain({1, "a"}, /*for_newcomers=*/true, /*excuses_from_us=*/100, now_us_);
  now_us_ = 50;
  End(0, MakeRound(1, "a", 0, 2), Cause::kOwnFailure);
  now_us_ = 150;
  End(1, MakeRound(1, "a", 1, 2), Cause::kOwnFailure);
  checker_.OnRound(0, MakeRound(2, "b", 0, 2), kOffer, now_us_);
  EXPECT_TRUE(Says("a failure was not charged"));
}

TEST_F(JobCheckerTest, AHangThatADrainCutsShortMayBeFree) {
  StartBoth(1, "a");
  checker_.OnDrain({1, "a"}, /*for_newcomers=*/true, /*excuses_from_us=*/100, now_us_);
  now_us_ = 50;
  EndBoth(1, "a", Cause::kHang);
  checker_.OnRound(0, MakeRound(2, "b", 0, 2), kOffer, now_us_);
  EXPECT_EQ(checker_.violation(), std::nullopt);
}

TEST_F(JobCheckerTest, SeesNewcomersThatAreNotGathered) {
  for (const int64_t drained_us : {1'040, 1'060}) {
    JobChecker checker({.max_nodes = 4, .scale_up_delay_us = 50});
    checker.OnRound(0, MakeRound(1, "a", 0, 1), kOffer, 0);
    checker.OnDrain({1, "a"}, /*for_newcomers=*/true, /*excuses_from_us=*/0, drained_us);
    checker.OnRound(0, MakeRound(2, "b", 0, 2), kOffer, 2'000, /*joined_us=*/1'500);
    checker.OnRound(1, MakeRound(2, "b", 1, 2), kOffer, 2'000, /*joined_us=*/1'000);
    EXPECT_EQ(checker.violation().has_value(), drained_us == 1'040);
  }
}

TEST_F(JobCheckerTest, NewcomersThatFillTheJobNeedNotBeGathered) {
  for (const int max_nodes : {3, 4}) {
    JobChecker checker({.max_nodes = max_nodes, .scale_up_delay_us = 50});
    checker.OnRound(0, MakeRound(1, "a", 0, 2), kOffer, 0);
    checker.OnRound(1, MakeRound(1, "a", 1, 2), kOffer, 0);
    checker.OnDrain({1, "a"}, /*for_newcomers=*/true, /*excuses_from_us=*/0, 1'040);
    // The program takes four workers only, as it has told since the drain.
    Round round = MakeRound(2, "b", 0, 2);
    round.reason = absl::StrCat("node ", kOffer.host, " joins");
    checker.OnRound(2, round, kOffer, 2'000, /*joined_us=*/1'000);
    EXPECT_EQ(checker.violation().has_value(), max_nodes == 4);
  }
}

TEST_F(JobCheckerTest, SeesTheBudgetExceeded) {
  Round round = MakeRound(1, "a", 0, 2);
  round.restarts = 2;
  checker_.OnRound(0, round, kOffer, now_us_);
  EXPECT_TRUE(Says("2 restarts, the budget is 1"));
}

TEST_F(JobCheckerTest, SeesASoundNodeGivenUp) {
  Round round = MakeRound(1, "a", 0, 1);
  round.reason = "node host-1 was lost";
  checker_.OnRound(0, round, kOffer, now_us_);
  EXPECT_TRUE(Says("nothing happened to any node"));
}

TEST_F(JobCheckerTest, SeesAPortThatWasNotOffered) {
  Round round = MakeRound(1, "a", 0, 2);
  round.placement.master_port = 7;
  checker_.OnRound(0, round, kOffer, now_us_);
  EXPECT_TRUE(Says("offered port 0, the others were told 7"));
}

TEST_F(JobCheckerTest, KnowsUntilWhenAGenerationRanWell) {
  EXPECT_LT(checker_.RanWellUntil(5), 0);
  now_us_ = 10;
  StartBoth(1, "a");
  EXPECT_EQ(checker_.RanWellUntil(20), 20);
  checker_.OnContact(1, false, 30);
  EXPECT_EQ(checker_.RanWellUntil(40), 30);
  checker_.OnContact(1, true, 50);
  EXPECT_EQ(checker_.RanWellUntil(60), 60);
  now_us_ = 70;
  End(0, MakeRound(1, "a", 0, 2));
  EXPECT_EQ(checker_.RanWellUntil(80), 70);
}

TEST_F(JobCheckerTest, AGenerationThatHangsDoesNotRunWell) {
  StartBoth(1, "a");
  checker_.OnHang({1, "a"}, 20);
  EXPECT_EQ(checker_.RanWellUntil(30), 20);
}

TEST_F(JobCheckerTest, SeesWorkersOfTwoGenerationsOnANode) {
  Start(0, MakeRound(1, "a", 0, 2));
  Start(0, MakeRound(2, "b", 0, 2));
  EXPECT_TRUE(Says("starts generation 2.b while workers of generation 1.a live"));
}

}  // namespace
}  // namespace ddp::testing
