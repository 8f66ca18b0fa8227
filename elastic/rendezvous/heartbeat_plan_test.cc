#include "elastic/rendezvous/heartbeat_plan.h"

#include <limits>
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
  return {.interval = kInterval, .lease = absl::Seconds(3), .nodes = nodes};
}

// Returns an argument of the heartbeat that is sent at `now`.
std::string Sent(HeartbeatPlan& plan, absl::Time now, const std::string& name) {
  for (const ScriptArgument& argument : plan.Compose(now)) {
    if (argument.name == name) return argument.value;
  }
  return "no such argument";
}

// Returns the values of that heartbeat: step, rate, busy_us, report, max_world, at_work.
std::vector<std::string> Values(HeartbeatPlan& plan, absl::Time now) {
  std::vector<std::string> values;
  for (const ScriptArgument& argument : plan.Compose(now)) values.push_back(argument.value);
  return values;
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
  plan.OnAnswer(kStart, 0);
  EXPECT_EQ(plan.due(), kStart + 0.9 * kInterval);
  plan.OnAnswer(kStart, 0.5);
  EXPECT_EQ(plan.due(), kStart + kInterval);
  plan.OnAnswer(kStart, 1);
  EXPECT_EQ(plan.due(), kStart + 1.1 * kInterval);
}

TEST(HeartbeatPlanTest, SaysOnceHowManyWorkersTheProgramAccepts) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  plan.SetReport({.max_world_size = 12});
  EXPECT_EQ(Sent(plan, kStart, "max_world"), "12");
  EXPECT_EQ(Sent(plan, kStart, "max_world"), "12") << "not answered";
  plan.OnAnswer(kStart, 0);
  EXPECT_EQ(Sent(plan, kStart, "max_world"), "");
  plan.ForgetWhatWasSaid();
  EXPECT_EQ(Sent(plan, kStart, "max_world"), "12");
}

TEST(HeartbeatPlanTest, CanBeMadeDueAtOnce) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  plan.OnAnswer(kStart, 0.5);
  plan.BeDueAt(kStart + absl::Milliseconds(7));
  EXPECT_EQ(plan.due(), kStart + absl::Milliseconds(7));
}

TEST(HeartbeatPlanTest, SaysHowFarItIsAndWhatHasChanged) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  plan.SetReport({.step = 5, .steps_per_second = 2.5, .busy_us = 1000, .row = "{1}"});
  EXPECT_THAT(Values(plan, kStart), ElementsAre("5", "2.500", "1000", "{1}", "", ""));
  // The heartbeat was not answered, so the next one repeats it.
  EXPECT_THAT(Values(plan, kStart), ElementsAre("5", "2.500", "1000", "{1}", "", ""));
  plan.OnAnswer(kStart, 0);
  const absl::Time later = kStart + absl::Seconds(2);
  EXPECT_THAT(Values(plan, later), ElementsAre("5", "2.500", "", "", "", ""));
  plan.SetReport({.step = 6, .steps_per_second = 3, .busy_us = 1049, .row = "{1}"});
  EXPECT_THAT(Values(plan, later), ElementsAre("6", "3.000", "", "", "", "")) << "hardly changed";
  plan.SetReport({.step = 6, .steps_per_second = 3, .busy_us = 1051, .row = "{2}"});
  EXPECT_THAT(Values(plan, later), ElementsAre("6", "3.000", "1051", "{2}", "", ""));
  plan.OnAnswer(later, 0);
  plan.ForgetWhatWasSaid();
  EXPECT_THAT(Values(plan, later + absl::Seconds(2)),
              ElementsAre("6", "3.000", "1051", "{2}", "", ""));
}

TEST(HeartbeatPlanTest, SaysWhichRankWorksUntilNoneDoes) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  const auto said = [&plan](absl::Duration after) {
    const std::string text = Sent(plan, kStart + after, "at_work");
    plan.OnAnswer(kStart + after, 0);
    return text;
  };
  EXPECT_EQ(said(absl::Seconds(0)), "") << "nobody has worked";
  plan.SetReport(
      {.at_work = RankAtWork{.rank = 3, .phase = "data", .stalled_for = absl::Seconds(2.5)}});
  EXPECT_EQ(said(absl::Seconds(1)), "2500 3 data");
  EXPECT_EQ(said(absl::Seconds(1.5)), "") << "not so soon";
  EXPECT_EQ(said(absl::Seconds(2)), "2500 3 data");
  plan.SetReport({});
  EXPECT_EQ(said(absl::Seconds(3)), "-");
  EXPECT_EQ(said(absl::Seconds(4)), "");
}

TEST(HeartbeatPlanTest, RowsOfAllNodesStayUnderAThousandPerSecond) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(4000), kStart, 0.5, 0);
  const auto says_row = [&](absl::Duration after) {
    plan.SetReport({.row = absl::StrCat("{", absl::FormatDuration(after), "}")});
    return !Sent(plan, kStart + after, "report").empty();
  };
  EXPECT_FALSE(says_row(0.4 * kInterval));
  EXPECT_TRUE(says_row(0.5 * kInterval));
  plan.OnAnswer(kStart, 0);
  EXPECT_FALSE(says_row(absl::Milliseconds(3900)));
  EXPECT_TRUE(says_row(absl::Milliseconds(4000)));
}

TEST(HeartbeatPlanTest, WhatIsSaidOfStepsIsAboutTheRound) {
  HeartbeatPlan plan;
  plan.SetReport({.step = 5, .busy_us = 10});
  plan.Start(RhythmOf(2), kStart, 0, 0);
  EXPECT_EQ(Sent(plan, kStart, "step"), "-1");
}

TEST(HeartbeatPlanTest, NonsenseOfAWorkerDoesNotReachTheServer) {
  HeartbeatPlan plan;
  plan.Start(RhythmOf(2), kStart, 0, 0);
  for (const double rate :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity(), -1.0}) {
    plan.SetReport({.step = -7, .steps_per_second = rate, .busy_us = -3});
    EXPECT_THAT(Values(plan, kStart), ElementsAre("-1", "0.000", "", "", "", ""));
  }
}

}  // namespace
}  // namespace ddp::elastic
