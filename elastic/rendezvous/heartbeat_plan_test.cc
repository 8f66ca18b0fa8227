#include "elastic/rendezvous/heartbeat_plan.h"

#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kInterval = absl::Milliseconds(500);
const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

HeartbeatPlan::Rhythm RhythmOf(int nodes) {
  return {.interval = kInterval, .lease = absl::Seconds(3), .nodes = nodes, .full_heartbeats = 32};
}

// Returns how many light heartbeats come between two full ones.
int LightPerFull(const HeartbeatPlan::Rhythm& rhythm) {
  HeartbeatPlan plan;
  plan.Start(rhythm, kStart, 0, 0);
  EXPECT_FALSE(plan.next_is_light());
  const bool announced = plan.Compose(plan.due()).at(4) == "1";
  for (int i = 0; i < 2; ++i) {  // fewer light ones follow the first
    while (plan.next_is_light()) plan.OnLightAnswer(plan.due(), 0.5);
    plan.OnFullAnswer(plan.due(), std::nullopt, 0.5);
  }
  int light = 0;
  for (; plan.next_is_light(); ++light) plan.OnLightAnswer(plan.due(), 0.5);
  EXPECT_EQ(announced, light > 0);
  return light;
}

TEST(HeartbeatPlanTest, AJobSendsEnoughFullHeartbeatsAndANodeOneInThreeLeases) {
  EXPECT_EQ(LightPerFull(RhythmOf(1)), 0);
  EXPECT_EQ(LightPerFull(RhythmOf(32)), 0);
  EXPECT_EQ(LightPerFull(RhythmOf(33)), 1);
  EXPECT_EQ(LightPerFull(RhythmOf(64)), 1);
  EXPECT_EQ(LightPerFull(RhythmOf(65)), 2);
  EXPECT_EQ(LightPerFull(RhythmOf(161)), 5);
  EXPECT_EQ(LightPerFull(RhythmOf(544)), 16);
  EXPECT_EQ(LightPerFull(RhythmOf(545)), 17);
  EXPECT_EQ(LightPerFull(RhythmOf(10'000)), 17);
}

TEST(HeartbeatPlanTest, SlowHeartbeatsAreMoreOftenFull) {
  HeartbeatPlan::Rhythm rhythm = RhythmOf(10'000);
  rhythm.interval = absl::Seconds(1);
  EXPECT_EQ(LightPerFull(rhythm), 8);
  rhythm.interval = absl::Seconds(3);
  EXPECT_EQ(LightPerFull(rhythm), 2);
}

// All nodes have sent a full heartbeat at once: a round has begun, or the server was away.
TEST(HeartbeatPlanTest, FullOnesThatAllNodesWereCalledForAreFollowedBySpreadOnes) {
  std::map<int, int> nodes_by_light;
  for (int node = 0; node < 1800; ++node) {
    HeartbeatPlan plan;
    plan.Start(RhythmOf(1800), kStart, 0, 0);
    for (const bool is_first : {true, false}) {
      plan.OnFullAnswer(kStart, std::nullopt, node / 1800.0);
      int light = 0;
      for (; plan.next_is_light(); ++light) plan.OnLightAnswer(plan.due(), 0.5);
      ++nodes_by_light[light];
      if (is_first) plan.BeInFullAt(kStart);
    }
  }
  EXPECT_EQ(nodes_by_light.size(), 17u);
  for (const auto& [light, nodes] : nodes_by_light) EXPECT_LE(nodes, 3600 / 17 + 2) << light;
}

TEST(HeartbeatPlanTest, BeatsOncePerIntervalOnAverage) {
  HeartbeatPlan plan;
  EXPECT_EQ(plan.due(), absl::InfiniteFuture());
  plan.Start(RhythmOf(2), kStart, 0, 0);
  EXPECT_EQ(plan.due(), kStart + 0.3 * kInterval);
  plan.Start(RhythmOf(8000), kStart, 0, 1);
  EXPECT_EQ(plan.due(), kStart + absl::Milliseconds(1200)) << "all nodes begin at once";
  plan.Start(RhythmOf(100'000), kStart, 0, 1);
  EXPECT_EQ(plan.due(), kStart + absl::Milliseconds(1500)) << "half of the lease";
  plan.Start(RhythmOf(2), kStart, 0, 0);
  plan.OnFullAnswer(kStart, std::nullopt, 0);
  EXPECT_EQ(plan.due(), kStart + 0.9 * kInterval);
  plan.OnFullAnswer(kStart, std::nullopt, 0.5);
  EXPECT_EQ(plan.due(), kStart + kInterval);
  plan.OnLightAnswer(kStart, 1);
  EXPECT_EQ(plan.due(), kStart + 1.1 * kInterval);
}

TEST(HeartbeatPlanTest, NodesBeatAtTheSameMomentsOfTheServersClock) {
  const absl::Duration slot = kInterval / HeartbeatPlan::kSlotsPerInterval;
  const absl::Time server_now = absl::FromUnixMillis(1'700'000'000'013);
  const auto is_a_moment = [&](absl::Time server_time) {
    return absl::ToUnixMicros(server_time) % absl::ToInt64Microseconds(slot) == 0;
  };
  std::map<absl::Time, int> nodes_by_due;
  for (int node = 0; node < 1000; ++node) {
    // Each node's clock differs.
    const absl::Duration behind = absl::Hours(node) + absl::Microseconds(node * 1300);
    const absl::Time now = server_now - behind;
    HeartbeatPlan plan;
    plan.Start(RhythmOf(1000), now, 0, 0);
    plan.OnFullAnswer(now, server_now, node / 1000.0);
    const absl::Time due = plan.due() + behind;
    EXPECT_TRUE(is_a_moment(due));
    const absl::Duration wanted = kInterval * (0.9 + 0.2 * node / 1000.0);
    EXPECT_LE(absl::AbsDuration(due - server_now - wanted), slot / 2);
    ++nodes_by_due[due];
    // A light answer tells no time: the last full one counts.
    plan.OnLightAnswer(plan.due(), 0.7);
    EXPECT_TRUE(is_a_moment(plan.due() + behind));
  }
  EXPECT_GE(nodes_by_due.size(), 5u) << "not all in the same moment";
  for (const auto& [due, nodes] : nodes_by_due) EXPECT_LE(nodes, 210) << due;
}

TEST(HeartbeatPlanTest, TheQuickestAnswerTellsTheServersClockBest) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  const auto due_after = [&](absl::Duration server_ahead) {
    plan.OnFullAnswer(kStart, kStart + server_ahead, 0.5);
    return plan.due() - kStart - kInterval;  // the server was at the start of a slot then
  };
  EXPECT_EQ(due_after(-absl::Milliseconds(5)), absl::Milliseconds(5)) << "late by 5 ms";
  EXPECT_EQ(due_after(-absl::Milliseconds(2)), absl::Milliseconds(2));
  EXPECT_EQ(due_after(-absl::Milliseconds(9)), absl::Milliseconds(2)) << "no better than the last";
  EXPECT_EQ(due_after(-absl::Seconds(1)), absl::Milliseconds(2)) << "a server that was busy";
  EXPECT_EQ(due_after(-absl::Hours(1) - absl::Milliseconds(4)), absl::Milliseconds(4))
      << "the server's clock was set";
}

TEST(HeartbeatPlanTest, AClockMayDrift) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  plan.OnFullAnswer(kStart, kStart, 0.5);
  // The node's clock is fast by 20 us per second.
  const absl::Time later = kStart + absl::Seconds(100);
  plan.OnFullAnswer(later, later - absl::Milliseconds(2), 0.5);
  EXPECT_EQ(plan.due(), later + kInterval + absl::Milliseconds(2));
}

TEST(HeartbeatPlanTest, ALeaseWithoutEndIsNoTrouble) {
  HeartbeatPlan::Rhythm rhythm = RhythmOf(10'000);
  rhythm.lease = absl::Milliseconds(int64_t{1} << 50);
  EXPECT_EQ(LightPerFull(rhythm), 17);
  rhythm.lease = absl::Milliseconds(1);
  EXPECT_EQ(LightPerFull(rhythm), 0);
}

TEST(HeartbeatPlanTest, SlotsAreShortWhereHeartbeatsAreFrequent) {
  HeartbeatPlan::Rhythm rhythm = RhythmOf(2);
  rhythm.interval = absl::Milliseconds(50);
  HeartbeatPlan plan;
  plan.Start(rhythm, kStart, 0, 0);
  plan.OnFullAnswer(kStart, absl::UnixEpoch() + absl::Microseconds(900), 0.5);
  EXPECT_EQ(plan.due(), kStart + absl::Microseconds(50'000 - 900));
}

TEST(HeartbeatPlanTest, CanBeCalledForInFull) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(10'000), kStart, 0, 0);
  plan.OnFullAnswer(kStart, std::nullopt, 0.5);
  ASSERT_TRUE(plan.next_is_light());
  const absl::Time due = plan.due();
  plan.BeInFull();
  EXPECT_FALSE(plan.next_is_light());
  EXPECT_EQ(plan.due(), due);
  plan.OnFullAnswer(kStart, std::nullopt, 0.5);
  ASSERT_TRUE(plan.next_is_light());
  plan.BeInFullAt(kStart + absl::Milliseconds(7));
  EXPECT_FALSE(plan.next_is_light());
  EXPECT_EQ(plan.due(), kStart + absl::Milliseconds(7));
}

TEST(HeartbeatPlanTest, SaysHowFarItIsAndWhatHasChanged) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  plan.SetReport({.step = 5, .steps_per_second = 2.5, .busy_us = 1000, .row = "{1}"});
  EXPECT_THAT(plan.Compose(kStart), ElementsAre("5", "2.500", "1000", "{1}", ""));
  // The heartbeat was not answered, so the next one repeats it.
  EXPECT_THAT(plan.Compose(kStart), ElementsAre("5", "2.500", "1000", "{1}", ""));
  plan.OnFullAnswer(kStart, std::nullopt, 0);
  const absl::Time later = kStart + absl::Seconds(2);
  EXPECT_THAT(plan.Compose(later), ElementsAre("5", "2.500", "", "", ""));
  plan.SetReport({.step = 6, .steps_per_second = 3, .busy_us = 1049, .row = "{1}"});
  EXPECT_THAT(plan.Compose(later), ElementsAre("6", "3.000", "", "", "")) << "hardly changed";
  plan.SetReport({.step = 6, .steps_per_second = 3, .busy_us = 1051, .row = "{2}"});
  EXPECT_THAT(plan.Compose(later), ElementsAre("6", "3.000", "1051", "{2}", ""));
  plan.OnFullAnswer(later, std::nullopt, 0);
  plan.ForgetWhatWasSaid();
  EXPECT_THAT(plan.Compose(later + absl::Seconds(2)), ElementsAre("6", "3.000", "1051", "{2}", ""));
}

TEST(HeartbeatPlanTest, RowsOfAllNodesStayUnderAThousandPerSecond) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(4000), kStart, 0.5, 0);
  const auto says_row = [&](absl::Duration after) {
    plan.SetReport({.row = absl::StrCat("{", absl::FormatDuration(after), "}")});
    return !plan.Compose(kStart + after).at(3).empty();
  };
  EXPECT_FALSE(says_row(0.4 * kInterval));
  EXPECT_TRUE(says_row(0.5 * kInterval));
  plan.OnFullAnswer(kStart, std::nullopt, 0);
  EXPECT_FALSE(says_row(absl::Milliseconds(3900)));
  EXPECT_TRUE(says_row(absl::Milliseconds(4000)));
}

TEST(HeartbeatPlanTest, WhatIsSaidOfStepsIsAboutTheRound) {
  HeartbeatPlan plan;
  plan.SetReport({.step = 5, .busy_us = 10});
  plan.Start(RhythmOf(2), kStart, 0, 0);
  EXPECT_EQ(plan.Compose(kStart).at(0), "-1");
}

TEST(HeartbeatPlanTest, NonsenseOfAWorkerDoesNotReachTheServer) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  for (const double rate :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity(), -1.0}) {
    plan.SetReport({.step = -7, .steps_per_second = rate, .busy_us = -3});
    EXPECT_THAT(plan.Compose(kStart), ElementsAre("-1", "0.000", "", "", ""));
  }
}

}  // namespace
}  // namespace ddp::elastic
