#include "elastic/agent/node_status_tracker.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

class NodeStatusTrackerTest : public ::testing::Test {
 protected:
  NodeStatusTrackerTest() : tracker_(Identity()) {
    tracker_.BeginGeneration({.number = 4,
                              .nonce = "00000000000000aa",
                              .reason = "node b was lost",
                              .restarts = 2,
                              .group_rank = 1,
                              .nodes = 3,
                              .world_size = 6});
    tracker_.SetState("running");
    tracker_.WorkerStarted(0, 2, 100, now_);
    tracker_.WorkerStarted(1, 3, 101, now_);
  }

  static NodeStatusTracker::Identity Identity() {
    NodeStatusTracker::Identity identity;
    identity.job.run_id = "digits";
    identity.host = "a-1";
    identity.job.role = "trainer";
    identity.agent_pid = 99;
    identity.job.limits.max_restarts = 5;
    identity.job.limits.min_nodes = 2;
    identity.job.limits.max_nodes = 3;
    return identity;
  }

  void Commit(int local_rank, int64_t step, absl::Time at, const std::string& phase = "forward") {
    tracker_.Observe(local_rank,
                     {.step = step, .commit_monotonic_ns = absl::ToUnixNanos(at), .phase = phase},
                     now_);
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  NodeStatusTracker tracker_;
};

TEST_F(NodeStatusTrackerTest, KnowsNothingBeforeTheFirstStep) {
  now_ += absl::Seconds(3);
  const NodeRow row = tracker_.Row(now_);
  EXPECT_EQ(row.host, "a-1");
  EXPECT_EQ(row.state, "running");
  EXPECT_EQ(row.group_rank, 1);
  EXPECT_EQ(row.generation, 4u);
  ASSERT_EQ(row.ranks.size(), 2u);
  EXPECT_EQ(row.ranks[1].rank, 3);
  EXPECT_EQ(row.ranks[1].pid, 101);
  EXPECT_EQ(row.ranks[1].step, -1);
  EXPECT_EQ(row.ranks[1].steps_per_second, -1);
  EXPECT_EQ(row.ranks[1].progress_age_s, 3);  // since the start of the worker
  EXPECT_EQ(tracker_.highest_step(), -1);
  EXPECT_EQ(tracker_.StepsPerSecond(now_), -1);
}

TEST_F(NodeStatusTrackerTest, MeasuresSpeedOverTheLastSteps) {
  for (int step = 0; step <= 400; ++step) {
    // A step takes 100 ms up to step 100, then 50 ms.
    now_ += absl::Milliseconds(step <= 100 ? 100 : 50);
    Commit(0, step, now_);
    if (step == 100) {
      EXPECT_NEAR(tracker_.StepsPerSecond(now_), 10, 0.01);
    }
  }
  // 300 steps of 50 ms take 15 s. The window is 20 s plus the second in which it begins.
  EXPECT_GT(tracker_.StepsPerSecond(now_), 16);
  for (int step = 401; step <= 700; ++step) {
    now_ += absl::Milliseconds(50);
    Commit(0, step, now_);
  }
  EXPECT_NEAR(tracker_.StepsPerSecond(now_), 20, 0.01);
  EXPECT_EQ(tracker_.highest_step(), 700);
  const NodeRow row = tracker_.Row(now_);
  EXPECT_EQ(row.ranks[0].phase, "forward");
  EXPECT_EQ(row.ranks[0].progress_age_s, 0);
  EXPECT_EQ(row.ranks[1].step, -1);
}

TEST_F(NodeStatusTrackerTest, ARankThatStandsStillGetsSlower) {
  Commit(0, 10, now_ += absl::Seconds(1));
  Commit(0, 20, now_ += absl::Seconds(1));
  EXPECT_EQ(tracker_.StepsPerSecond(now_), 10);
  now_ += absl::Milliseconds(50);  // the next step is not late yet
  EXPECT_EQ(tracker_.StepsPerSecond(now_), 10);
  now_ += absl::Seconds(20) - absl::Milliseconds(50);
  EXPECT_EQ(tracker_.StepsPerSecond(now_), 0.05);
  EXPECT_EQ(tracker_.Row(now_).ranks[0].progress_age_s, 20);
}

TEST_F(NodeStatusTrackerTest, CountsFailedSavesOverAllGenerations) {
  EXPECT_EQ(tracker_.Row(now_).failed_saves, 0);
  tracker_.Observe(0, {.failed_saves = 2, .failed_saves_in_a_row = 2, .save_error = "disk full"},
                   now_);
  tracker_.Observe(1, {.failed_saves = 2, .failed_saves_in_a_row = 2, .save_error = "disk full"},
                   now_);
  EXPECT_EQ(tracker_.Row(now_).failed_saves, 2);  // both ranks report the same failed save
  EXPECT_EQ(tracker_.Row(now_).failed_saves_in_a_row, 2);
  EXPECT_EQ(tracker_.Row(now_).save_error, "disk full");
  tracker_.WorkerEnded(0);
  EXPECT_EQ(tracker_.Row(now_).failed_saves, 2);

  tracker_.BeginGeneration({.number = 5});
  tracker_.WorkerStarted(0, 0, 200, now_);
  EXPECT_EQ(tracker_.Row(now_).failed_saves, 2);
  EXPECT_EQ(tracker_.Row(now_).failed_saves_in_a_row, 0);
  tracker_.Observe(0, {.failed_saves = 1, .failed_saves_in_a_row = 1, .save_error = "I/O error"},
                   now_);
  tracker_.Observe(0, {.failed_saves = 1}, now_);
  EXPECT_EQ(tracker_.Row(now_).failed_saves, 3);
  EXPECT_EQ(tracker_.Row(now_).failed_saves_in_a_row, 0);
  EXPECT_EQ(tracker_.Row(now_).save_error, "I/O error");
  // The worker writes its page, so its counts are not trusted.
  tracker_.Observe(0, {.failed_saves = INT64_MAX, .failed_saves_in_a_row = INT64_MAX}, now_);
  EXPECT_TRUE(ParseNodeRow(FormatNodeRow(tracker_.Row(now_))).ok());
  tracker_.BeginGeneration({.number = 6});
  EXPECT_TRUE(ParseNodeRow(FormatNodeRow(tracker_.Row(now_))).ok());
}

// The worker writes its page, so its stamps are not trusted.
TEST_F(NodeStatusTrackerTest, DoesNotBelieveAStampThatCannotBe) {
  now_ += absl::Seconds(10);
  Commit(0, 1, now_ - absl::Hours(10));
  EXPECT_EQ(tracker_.Row(now_).ranks[0].progress_age_s, 10);
  Commit(0, 2, now_ + absl::Hours(10));
  EXPECT_EQ(tracker_.Row(now_).ranks[0].progress_age_s, 0);
  EXPECT_NEAR(tracker_.StepsPerSecond(now_), 0.1, 1e-9);
  Commit(0, 3, now_);
  Commit(1, 1, absl::InfinitePast());
  Commit(1, INT64_MAX, absl::InfiniteFuture());
  EXPECT_GT(tracker_.StepsPerSecond(now_), 0);
  Commit(7, 1, now_);  // no such worker
  EXPECT_EQ(tracker_.Row(now_).ranks.size(), 2u);
}

TEST_F(NodeStatusTrackerTest, AStepThatGoesBackBeginsANewCount) {
  Commit(0, 10, now_ += absl::Seconds(1));
  Commit(0, 20, now_ += absl::Seconds(1));
  Commit(0, 5, now_ += absl::Seconds(1));
  EXPECT_EQ(tracker_.StepsPerSecond(now_), -1);
  EXPECT_EQ(tracker_.highest_step(), 5);
  Commit(0, 6, now_ += absl::Seconds(2));
  EXPECT_EQ(tracker_.StepsPerSecond(now_), 0.5);
}

TEST_F(NodeStatusTrackerTest, ANewGenerationForgetsTheWorkers) {
  Commit(0, 10, now_);
  tracker_.SetStragglerFactor(0, 2.5);
  EXPECT_EQ(tracker_.Row(now_).ranks[0].straggler_factor, 2.5);
  tracker_.BeginGeneration({.number = 5});
  EXPECT_TRUE(tracker_.Row(now_).ranks.empty());
  tracker_.WorkerStarted(0, 0, 200, now_);
  EXPECT_EQ(tracker_.Row(now_).ranks[0].step, -1);
  EXPECT_EQ(tracker_.Row(now_).ranks[0].straggler_factor, -1);
}

TEST_F(NodeStatusTrackerTest, AWorkerThatHasEndedStaysWhereItWas) {
  Commit(0, 10, now_ += absl::Seconds(1), "optimizer");
  Commit(0, 11, now_ += absl::Seconds(1), "optimizer");
  tracker_.SetStragglerFactor(0, 2.5);
  tracker_.WorkerEnded(0);
  tracker_.WorkerEnded(7);
  Commit(0, 12, now_);
  const NodeRow row = tracker_.Row(now_);
  ASSERT_EQ(row.ranks.size(), 2u);
  EXPECT_EQ(row.ranks[0].pid, 0);
  EXPECT_EQ(row.ranks[0].step, 11);
  EXPECT_EQ(row.ranks[0].steps_per_second, -1);
  EXPECT_EQ(row.ranks[0].phase, "");
  EXPECT_EQ(row.ranks[0].straggler_factor, -1);
}

TEST_F(NodeStatusTrackerTest, TellsTheRowAnewWhenItIsDue) {
  const std::string first = tracker_.RowText(now_);
  ASSERT_TRUE(ParseNodeRow(first).ok());
  Commit(0, 10, now_ += absl::Milliseconds(500));
  EXPECT_EQ(tracker_.RowText(now_), first);  // not even a second has passed
  now_ += absl::Milliseconds(500);
  const std::string second = tracker_.RowText(now_);
  EXPECT_EQ(ParseNodeRow(second)->ranks[0].step, 10);
  // A change of the agent's state is sent at once.
  tracker_.SetState("stopping");
  EXPECT_EQ(ParseNodeRow(tracker_.RowText(now_))->state, "stopping");
  tracker_.WorkerEnded(0);
  EXPECT_EQ(ParseNodeRow(tracker_.RowText(now_))->ranks[0].pid, 0);
}

TEST_F(NodeStatusTrackerTest, IsTheJobAsOneNodeKnowsIt) {
  tracker_.StoreOutOfReach();
  tracker_.StoreOutOfReach();
  tracker_.WorkerHung();
  JobStatus status = tracker_.Status(now_);
  EXPECT_EQ(status.run_id, "digits");
  EXPECT_EQ(status.generation, 4u);
  EXPECT_EQ(status.nonce, "00000000000000aa");
  EXPECT_EQ(status.reason, "node b was lost");
  EXPECT_EQ(status.restarts, 2);
  EXPECT_EQ(status.max_restarts, 5);
  EXPECT_EQ(status.world_size, 6);
  EXPECT_EQ(status.nodes_total, 3);
  ASSERT_EQ(status.nodes.size(), 1u);
  EXPECT_EQ(status.nodes[0].row, tracker_.Row(now_));
  EXPECT_FALSE(status.store_in_reach);
  EXPECT_EQ(status.store_outages, 1u);
  EXPECT_EQ(status.hangs, 1u);
  tracker_.StoreBack();
  EXPECT_TRUE(tracker_.Status(now_).store_in_reach);
}

TEST(NodeStatusTrackerFirstTest, BeforeTheFirstRoundThereIsNoRank) {
  NodeStatusTracker tracker({});
  const absl::Time now = absl::FromUnixSeconds(1);
  EXPECT_EQ(tracker.Row(now).group_rank, -1);
  EXPECT_EQ(tracker.Status(now).world_size, 0);
  EXPECT_FALSE(tracker.Status(now).nodes[0].is_member);
}

}  // namespace
}  // namespace ddp::elastic
