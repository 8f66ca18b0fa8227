#include "elastic/health/straggler_detector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kUnknown = -1;

// A rank's own work per step, in milliseconds by phase; it waits for the rest of the step.
using Work = std::map<Phase, int64_t>;

// Ranks in lockstep: a step takes as long as the slowest rank's work.
class StragglerDetectorTest : public ::testing::Test {
 protected:
  void Begin(std::vector<Work> work) {
    work_ = std::move(work);
    pages_.assign(work_.size(), {});
    detector_.Begin(now_);
  }

  void Step() {
    int64_t slowest_ms = 0;
    for (const Work& work : work_) slowest_ms = std::max(slowest_ms, Own(work));
    const int64_t step_ms = slowest_ms + kTransferMs;
    now_ += absl::Milliseconds(step_ms);
    for (size_t i = 0; i < work_.size(); ++i) {
      HealthPage::Snapshot& page = pages_[i];
      page.has_step = true;
      ++page.commits;
      for (const auto& [phase, ms] : work_[i]) Spend(page, phase, ms);
      Spend(page, waiting_, step_ms - Own(work_[i]));
    }
  }

  // Runs `count` windows; returns how many stragglers each reported.
  std::vector<size_t> Windows(int count, int64_t job_median_us = kUnknown) {
    std::vector<size_t> told;
    while (static_cast<int>(told.size()) < count) {
      const absl::Time end = now_ + absl::Seconds(10);
      while (now_ < end) {
        for (size_t i = 0; i < pages_.size(); ++i) {
          detector_.Observe(static_cast<int>(i), pages_[i], now_);
        }
        const auto news = detector_.Check(now_, job_median_us);
        EXPECT_THAT(news, IsEmpty());
        Step();
      }
      for (size_t i = 0; i < pages_.size(); ++i) {
        detector_.Observe(static_cast<int>(i), pages_[i], now_);
      }
      news_ = detector_.Check(now_, job_median_us);
      told.push_back(news_.size());
    }
    return told;
  }

  static constexpr int64_t kTransferMs = 5;
  static int64_t Own(const Work& work) {
    int64_t sum = 0;
    for (const auto& [phase, ms] : work) sum += ms;
    return sum;
  }
  static void Spend(HealthPage::Snapshot& page, Phase phase, int64_t ms) {
    page.phase_total_us[static_cast<size_t>(phase)] += ms * 1000;
  }

  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  StragglerDetector detector_{{}};
  std::vector<Work> work_;
  std::vector<HealthPage::Snapshot> pages_;
  Phase waiting_ = Phase::kBackward;
  std::vector<StragglerDetector::Straggler> news_;
};

const Work kUsual = {{Phase::kData, 5}, {Phase::kForward, 20}, {Phase::kOptimizer, 5}};
const Work kSlowData = {{Phase::kData, 45}, {Phase::kForward, 20}, {Phase::kOptimizer, 5}};

TEST_F(StragglerDetectorTest, ASlowRankIsNamedWithItsPhaseAfterThreeWindows) {
  Begin({kUsual, kUsual, kSlowData, kUsual});
  EXPECT_THAT(Windows(3), ElementsAre(0, 0, 1));
  ASSERT_THAT(news_, SizeIs(1));
  EXPECT_EQ(news_[0].local_rank, 2);
  EXPECT_EQ(news_[0].phase, Phase::kData);
  EXPECT_NEAR(news_[0].factor, 70.0 / 30, 0.01);
  EXPECT_EQ(news_[0].own, absl::Milliseconds(70));
  EXPECT_EQ(news_[0].reference, absl::Milliseconds(30));
  EXPECT_EQ(DescribeStraggler(news_[0]),
            "takes 70ms of its own for a step, 2.3 times the median of 30ms, most of it lost in "
            "data");
  EXPECT_EQ(detector_.busy_us(), 70'000);
}

TEST_F(StragglerDetectorTest, ItIsToldOnceAndAgainAfterARecovery) {
  Begin({kUsual, kUsual, kSlowData});
  EXPECT_THAT(Windows(6), ElementsAre(0, 0, 1, 0, 0, 0));
  EXPECT_THAT(detector_.stragglers(), SizeIs(1));
  work_[2] = kUsual;
  EXPECT_THAT(Windows(2), ElementsAre(0, 0));
  EXPECT_THAT(detector_.stragglers(), IsEmpty());
  work_[2] = kSlowData;
  EXPECT_THAT(Windows(4), ElementsAre(0, 0, 1, 0));
}

TEST_F(StragglerDetectorTest, OneSlowWindowIsNoStraggler) {
  Begin({kUsual, kSlowData});
  EXPECT_THAT(Windows(2), ElementsAre(0, 0));
  work_[1] = kUsual;
  EXPECT_THAT(Windows(1), ElementsAre(0));
  work_[1] = kSlowData;
  EXPECT_THAT(Windows(2), ElementsAre(0, 0));
}

TEST_F(StragglerDetectorTest, OfAPairTheSlowOneIsFound) {
  Begin({kSlowData, kUsual});
  EXPECT_THAT(Windows(3), ElementsAre(0, 0, 1));
  EXPECT_EQ(news_[0].local_rank, 0);
}

TEST_F(StragglerDetectorTest, EqualRanksAreNoStragglers) {
  Begin({kUsual, kUsual, kUsual, kUsual});
  EXPECT_THAT(Windows(5), ElementsAre(0, 0, 0, 0, 0));
  EXPECT_EQ(detector_.busy_us(), 30'000);
}

TEST_F(StragglerDetectorTest, ANodeThatIsSlowAsAWholeIsFoundByTheJobsMedian) {
  Begin({kSlowData, kSlowData});
  EXPECT_THAT(Windows(3), ElementsAre(0, 0, 0));
  EXPECT_THAT(Windows(3, 30'000), ElementsAre(0, 0, 2));
  EXPECT_EQ(news_[0].phase, Phase::kData);
  EXPECT_EQ(news_[0].reference, absl::Milliseconds(30));
}

TEST_F(StragglerDetectorTest, ARankAloneIsComparedWithTheJob) {
  Begin({kSlowData});
  EXPECT_THAT(Windows(3), ElementsAre(0, 0, 0));
  EXPECT_EQ(detector_.busy_us(), 70'000);
  EXPECT_THAT(Windows(3, 30'000), ElementsAre(0, 0, 1));
}

TEST_F(StragglerDetectorTest, WhatIsNotFeltInTheStepIsNotWorthALine) {
  const Work tiny = {{Phase::kData, 1}, {Phase::kSynchronize, 500}};
  const Work larger = {{Phase::kData, 3}, {Phase::kSynchronize, 500}};
  Begin({tiny, larger});
  EXPECT_THAT(Windows(4), ElementsAre(0, 0, 0, 0));
}

TEST_F(StragglerDetectorTest, WithoutPhasesOfWaitingNothingIsSaid) {
  waiting_ = Phase::kOther;
  Begin({kUsual, kSlowData});
  EXPECT_THAT(Windows(4), ElementsAre(0, 0, 0, 0));
  EXPECT_EQ(detector_.busy_us(), -1);
}

TEST_F(StragglerDetectorTest, ARankThatTellsItsWaitsIsFoundInAnyPhase) {
  waiting_ = Phase::kSynchronize;
  Begin({{{Phase::kBackward, 20}}, {{Phase::kBackward, 50}}});
  for (HealthPage::Snapshot& page : pages_) page.tells_waits = true;
  EXPECT_THAT(Windows(3), ElementsAre(0, 0, 1));
  EXPECT_EQ(news_[0].local_rank, 1);
  EXPECT_EQ(news_[0].phase, Phase::kBackward);

  Begin({{{Phase::kOther, 20}}, {{Phase::kOther, 50}}});
  for (HealthPage::Snapshot& page : pages_) page.tells_waits = true;
  EXPECT_THAT(Windows(3), ElementsAre(0, 0, 1));
}

TEST_F(StragglerDetectorTest, CheckpointsOfOneRankAreNoOwnTime) {
  Work saves = kUsual;
  saves[Phase::kCheckpoint] = 100;
  Begin({kUsual, saves});
  EXPECT_THAT(Windows(4), ElementsAre(0, 0, 0, 0));
}

TEST_F(StragglerDetectorTest, LongStepsMakeLongWindows) {
  Begin({{{Phase::kForward, 4000}}, {{Phase::kForward, 9000}}});
  const absl::Time start = now_;
  while (detector_.stragglers().empty() && now_ < start + absl::Hours(1)) {
    Step();
    for (int i = 0; i < 2; ++i) detector_.Observe(i, pages_[i], now_);
    detector_.Check(now_, kUnknown);
  }
  EXPECT_EQ(pages_[0].commits, 16);  // five steps in each of three windows, after the first one
}

TEST_F(StragglerDetectorTest, AHostilePageIsLeftOut) {
  Begin({kUsual, kUsual, kSlowData});
  EXPECT_THAT(Windows(2), ElementsAre(0, 0));
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;  // Step() adds to it
  pages_[0].phase_total_us.fill(kHuge);
  pages_[0].commits = kHuge;
  for (int i = 0; i < 3; ++i) detector_.Observe(i, pages_[i], now_);
  work_[0].clear();
  const HealthPage::Snapshot lie = pages_[0];
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 200; ++i) {
      Step();
      pages_[0] = lie;
      pages_[0].commits -= 1'000'000 * round;
      for (int r = 0; r < 3; ++r) detector_.Observe(r, pages_[r], now_);
    }
    detector_.Check(now_, kUnknown);
  }
  EXPECT_LE(detector_.busy_us(), 100'000);
}

}  // namespace
}  // namespace ddp::elastic
