#include "testing/simulator/recovery_bound.h"

#include <gtest/gtest.h>

#include "testing/simulator/story.h"

namespace ddp::testing {
namespace {

Story MakeJob() {
  Story story;
  story.lease_us = 3000000;
  story.shutdown_timeout_us = 3000000;
  story.fault_grace_us = 200000;
  story.last_call_us = 5000000;
  return story;
}

TEST(RecoveryBoundTest, CountsWhatAJobWaitsFor) {
  const Story story = MakeJob();
  const int64_t bound_us = RecoveryBoundUs(story, true);
  // The sum of the lease, the end of the workers and two requests; the rest is parts of a lease.
  EXPECT_GT(bound_us, 3000000 + 3200000 + 4000000);
  EXPECT_LT(bound_us, 10 * 3000000 / 4 + 3200000 + 4000000);
  EXPECT_EQ(RecoveryBoundUs(story, false), bound_us + story.last_call_us);
}

TEST(RecoveryBoundTest, GrowsWithWhatTheJobIsLaunchedWith) {
  const Story story = MakeJob();
  const int64_t bound_us = RecoveryBoundUs(story, true);
  Story other = story;
  other.shutdown_timeout_us += 1000;
  EXPECT_EQ(RecoveryBoundUs(other, true), bound_us + 1000);
  other = story;
  other.slow_stray_chance = other.slow_exec_chance = 0.1;
  other.slow_stray_us = 5000;
  other.slow_exec_us = 100;
  other.nproc_max = 3;
  EXPECT_EQ(RecoveryBoundUs(other, true), bound_us + 5300);
  other = story;
  other.lease_us *= 2;
  EXPECT_GT(RecoveryBoundUs(other, true), bound_us + story.lease_us);
}

TEST(RecoveryBoundTest, ManyWaitingNodesAndLostMessagesTakeTheirTime) {
  const Story story = MakeJob();
  const int64_t bound_us = RecoveryBoundUs(story, true);
  Story other = story;
  other.hosts = 32;
  EXPECT_EQ(RecoveryBoundUs(other, true), bound_us);
  other.hosts = 33;
  EXPECT_GT(RecoveryBoundUs(other, true), bound_us);
  EXPECT_LT(RecoveryBoundUs(other, true), bound_us + story.lease_us);
  other = story;
  other.network.lose_reply = 0.01;
  EXPECT_GT(RecoveryBoundUs(other, true), bound_us);
}

}  // namespace
}  // namespace ddp::testing
