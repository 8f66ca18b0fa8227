#include "elastic/health/hang_detector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1'000'000);
constexpr int kOneNode = 1;
constexpr int kTwoNodes = 2;

int64_t Nanoseconds(absl::Time time) { return absl::ToUnixNanos(time); }

// A rank, as its page would show it.
struct FakeRank {
  HealthPage::Snapshot page;

  void Start(absl::Time now) {
    page = {.generation = 1, .worker = HealthPage::Worker::kAttached};
    page.step_start_monotonic_ns = page.phase_start_monotonic_ns = Nanoseconds(now);
  }
  void Commit(int64_t step, absl::Time now, absl::Duration took = absl::Seconds(1)) {
    page.has_step = true;
    page.step = step;
    ++page.commits;
    page.last_commit_monotonic_ns = page.step_start_monotonic_ns = Nanoseconds(now);
    page.longest_step_us = std::max(page.longest_step_us, absl::ToInt64Microseconds(took));
    if (page.phase == Phase::kStartup) Enter(Phase::kOther, now);
  }
  void Enter(Phase phase, absl::Time now) {
    if (!IsPartOfStep(page.phase)) page.step_start_monotonic_ns = Nanoseconds(now);
    page.phase = phase;
    page.phase_start_monotonic_ns = Nanoseconds(now);
  }
};

// As in the agent.
constexpr absl::Duration kLookPeriod = absl::Milliseconds(250);

// A node with two ranks, whose agent looks while time passes.
class HangDetectorTest : public ::testing::Test {
 protected:
  explicit HangDetectorTest(HangDetector::Options options = {}) : detector_(options) {}

  void Begin(int nodes = kOneNode) {
    detector_.Begin(now_, nodes);
    for (FakeRank& rank : ranks_) rank.Start(now_);
    step_ = 0;
  }

  // Lets time pass; returns the first hang.
  std::optional<HangDetector::Hang> Wait(absl::Duration duration) {
    const absl::Time end = now_ + duration;
    for (;;) {
      for (int i = 0; i < 2; ++i) detector_.Observe(i, ranks_[i].page, now_);
      if (const auto hang = detector_.Check(now_)) return hang;
      if (now_ >= end) return std::nullopt;
      now_ = std::min(end, now_ + kLookPeriod);
    }
  }

  // Both ranks do steps of one second. No rank is hung meanwhile.
  void Train(int steps) {
    for (int i = 0; i < steps; ++i) {
      EXPECT_EQ(Wait(absl::Seconds(1)), std::nullopt);
      ++step_;
      for (FakeRank& rank : ranks_) rank.Commit(step_, now_);
    }
    Wait(absl::ZeroDuration());
  }

  absl::Time now_ = kStart;
  HangDetector detector_;
  FakeRank ranks_[2];
  int64_t step_ = 0;
};

TEST_F(HangDetectorTest, ARankThatMakesNoStepIsFoundAtTheFloor) {
  Begin();
  Train(20);
  const absl::Time last = now_;
  ranks_[0].Enter(Phase::kBackward, now_);
  ranks_[1].Enter(Phase::kForward, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(now_ - last, absl::Seconds(30));
  EXPECT_EQ(hang->local_rank, 1);
  EXPECT_EQ(hang->phase, Phase::kForward);
  EXPECT_EQ(hang->limit, absl::Seconds(30));
  EXPECT_FALSE(hang->waits_for_peers);
  EXPECT_EQ(hang->stalled_for, absl::Seconds(30));
  EXPECT_EQ(hang->longest_step, absl::Seconds(1));
  EXPECT_EQ(hang->step, 20);
  EXPECT_EQ(DescribeHang(*hang), "made no step for 30s, in forward; the longest step took 1s");
}

TEST_F(HangDetectorTest, TheLimitIsLearnedFromTheLongestStep) {
  Begin();
  Train(10);
  EXPECT_EQ(Wait(absl::Seconds(20)), std::nullopt);
  ++step_;
  for (FakeRank& rank : ranks_) rank.Commit(step_, now_, absl::Seconds(20));
  const absl::Time last = now_;
  ASSERT_TRUE(Wait(absl::Hours(1)).has_value());
  EXPECT_EQ(now_ - last, absl::Seconds(100));
}

TEST_F(HangDetectorTest, NobodyIsHungBeforeEnoughWasSeen) {
  Begin();
  EXPECT_EQ(Wait(absl::Hours(2)), std::nullopt);
  Train(9);
  EXPECT_EQ(Wait(absl::Hours(2)), std::nullopt);
}

TEST_F(HangDetectorTest, ARestartedJobIsWatchedFromItsStart) {
  Begin();
  Train(6);
  Begin();
  Train(6);
  now_ += absl::Seconds(1);
  Begin();
  const absl::Time start = now_;
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(now_ - start, absl::Minutes(10));
  EXPECT_EQ(hang->phase, Phase::kStartup);
  EXPECT_EQ(hang->step, -1);
}

TEST_F(HangDetectorTest, ALongCheckpointIsNoHangAndItsPeersMayWait) {
  Begin();
  Train(20);
  ranks_[0].Enter(Phase::kCheckpoint, now_);
  ranks_[1].Enter(Phase::kBackward, now_);
  EXPECT_EQ(Wait(absl::Minutes(9)), std::nullopt);
  ranks_[0].Enter(Phase::kOther, now_);
  // The checkpoint is over; the step goes on.
  EXPECT_EQ(Wait(absl::Seconds(29)), std::nullopt) << "rank 1 had waited longer";
}

TEST_F(HangDetectorTest, ACheckpointThatDoesNotEndIsAHang) {
  Begin();
  Train(20);
  const absl::Time last = now_;
  ranks_[0].Enter(Phase::kBackward, now_);
  ranks_[1].Enter(Phase::kCheckpoint, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(now_ - last, absl::Minutes(10));
  EXPECT_EQ(hang->local_rank, 1);
}

TEST_F(HangDetectorTest, WhoIsBehindIsTheCulprit) {
  Begin();
  Train(20);
  ranks_[0].Commit(21, now_);
  ranks_[1].Enter(Phase::kOther, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->local_rank, 1);
  EXPECT_EQ(hang->step, 20);
}

TEST_F(HangDetectorTest, ACulpritThatStoppedALittleLaterIsStillTheCulprit) {
  Begin();
  Train(20);
  ranks_[0].Enter(Phase::kSynchronize, now_);
  // At one look the other rank's limit has passed and its own has not.
  EXPECT_EQ(Wait(kLookPeriod + absl::Milliseconds(50)), std::nullopt);
  ranks_[1].Commit(20, now_);
  ranks_[1].Enter(Phase::kForward, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->local_rank, 1);
  EXPECT_LT(hang->stalled_for, absl::Seconds(30));
}

// A network file system may stall for minutes; the peers wait meanwhile, and get a limit of their
// own only when the data has come.
TEST_F(HangDetectorTest, AWaitForDataHasAFloorOfItsOwn) {
  Begin();
  Train(20);
  ranks_[0].Enter(Phase::kBackward, now_);
  ranks_[1].Enter(Phase::kData, now_);
  EXPECT_EQ(Wait(absl::Minutes(9)), std::nullopt);
  ranks_[1].Enter(Phase::kForward, now_);
  EXPECT_EQ(Wait(absl::Seconds(28)), std::nullopt);
  Train(5);
  const absl::Time last = now_;
  ranks_[1].Enter(Phase::kData, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(now_ - last, absl::Minutes(10));
  EXPECT_EQ(hang->local_rank, 1);
}

// A rank that trains on by itself does not excuse a hung one by the data of its steps.
TEST_F(HangDetectorTest, TheDataOfAUsualStepExcusesNobody) {
  Begin();
  Train(20);
  const absl::Time last = now_;
  ranks_[1].Enter(Phase::kForward, now_);
  std::optional<HangDetector::Hang> hang;
  while (!hang.has_value() && now_ < last + absl::Minutes(5)) {
    ranks_[0].Enter(Phase::kData, now_);
    hang = Wait(absl::Milliseconds(500));
    if (hang.has_value()) break;
    ranks_[0].Enter(Phase::kForward, now_);
    hang = Wait(absl::Milliseconds(500));
    ranks_[0].Commit(++step_, now_);
  }
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->local_rank, 1);
  EXPECT_LE(now_ - last, absl::Seconds(32));
}

TEST_F(HangDetectorTest, AWarningComesAtHalfOfTheLimit) {
  Begin();
  Train(20);
  ranks_[1].Enter(Phase::kForward, now_);
  EXPECT_EQ(Wait(absl::Seconds(14)), std::nullopt);
  EXPECT_EQ(detector_.Check(now_, 0.5), std::nullopt);
  EXPECT_EQ(Wait(absl::Seconds(2)), std::nullopt);
  const auto warning = detector_.Check(now_, 0.5);
  ASSERT_TRUE(warning.has_value());
  EXPECT_EQ(warning->limit, absl::Seconds(30));
}

TEST_F(HangDetectorTest, AnExcuseStartsTheTimeAgain) {
  Begin();
  Train(20);
  ASSERT_TRUE(Wait(absl::Hours(1)).has_value());
  detector_.Excuse(now_);
  EXPECT_EQ(Wait(absl::Seconds(29)), std::nullopt);
  EXPECT_TRUE(Wait(absl::Seconds(2)).has_value());
}

TEST_F(HangDetectorTest, ExcusedTimeIsNoPartOfAStep) {
  Begin();
  Train(20);
  const absl::Time continued = now_ + absl::Hours(1);
  while (now_ < continued) {
    now_ += kLookPeriod;
    for (int i = 0; i < 2; ++i) detector_.Observe(i, ranks_[i].page, now_);
  }
  detector_.Excuse(now_);
  EXPECT_EQ(Wait(absl::Seconds(1)), std::nullopt);
  for (FakeRank& rank : ranks_) rank.Commit(++step_, now_, absl::Hours(1));
  EXPECT_EQ(Wait(absl::ZeroDuration()), std::nullopt);
  EXPECT_LE(detector_.longest_step(), absl::Seconds(2));
}

TEST_F(HangDetectorTest, RanksThatWaitForAnotherNodeGetMoreTime) {
  Begin(kTwoNodes);
  Train(20);
  const absl::Time last = now_;
  for (FakeRank& rank : ranks_) rank.Enter(Phase::kBackward, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(now_ - last, absl::Minutes(30));
  EXPECT_TRUE(hang->waits_for_peers);
  EXPECT_THAT(DescribeHang(*hang), HasSubstr("in backward (which waits for peers)"));
}

// Rank 0 of the job evaluates alone on another node, for longer than a wait may last.
TEST_F(HangDetectorTest, WhoWaitsForARankOfAnotherNodeThatWorksIsNotHung) {
  Begin(kTwoNodes);
  Train(20);
  for (FakeRank& rank : ranks_) rank.Enter(Phase::kSynchronize, now_);
  detector_.SetOthersAtWork(true, now_);
  EXPECT_EQ(Wait(absl::Minutes(4)), std::nullopt);
  EXPECT_EQ(detector_.FindLongWait(now_), std::nullopt);
  EXPECT_EQ(Wait(absl::Minutes(40)), std::nullopt);
  ASSERT_TRUE(detector_.FindLongWait(now_).has_value());
  EXPECT_EQ(detector_.FindLongWait(now_)->stalled_for, absl::Minutes(44));
  EXPECT_EQ(detector_.FindAtWork(now_), std::nullopt);
  // From now on nobody works, as far as is known.
  detector_.SetOthersAtWork(false, now_);
  EXPECT_EQ(Wait(absl::Minutes(29)), std::nullopt);
  EXPECT_TRUE(Wait(absl::Minutes(2)).has_value());
}

TEST_F(HangDetectorTest, WhoWorksIsWatchedByItsOwnNodeWhateverOthersDo) {
  Begin(kTwoNodes);
  Train(20);
  ranks_[0].Enter(Phase::kSynchronize, now_);
  ranks_[1].Enter(Phase::kForward, now_);
  detector_.SetOthersAtWork(true, now_);
  EXPECT_EQ(Wait(absl::Seconds(1)), std::nullopt);
  EXPECT_EQ(detector_.FindAtWork(now_), std::nullopt);
  EXPECT_EQ(Wait(absl::Seconds(20)), std::nullopt);
  ASSERT_TRUE(detector_.FindAtWork(now_).has_value());
  EXPECT_EQ(detector_.FindAtWork(now_)->local_rank, 1);
  EXPECT_EQ(detector_.FindAtWork(now_)->stalled_for, absl::Seconds(21));
  const auto hang = Wait(absl::Seconds(20));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->local_rank, 1);
  EXPECT_EQ(hang->stalled_for, absl::Seconds(30));
}

TEST_F(HangDetectorTest, NobodyIsToldToWaitForARankThatIsNotWatchedYet) {
  Begin(kTwoNodes);
  Train(9);
  for (FakeRank& rank : ranks_) rank.Enter(Phase::kForward, now_);
  EXPECT_EQ(Wait(absl::Minutes(1)), std::nullopt);
  EXPECT_EQ(detector_.FindAtWork(now_), std::nullopt);
}

TEST_F(HangDetectorTest, BackwardIsWorkOfARankThatTellsItsWaits) {
  Begin(kTwoNodes);
  Train(20);
  const absl::Time last = now_;
  for (FakeRank& rank : ranks_) rank.page.tells_waits = true;
  ranks_[0].Enter(Phase::kSynchronize, now_);
  ranks_[1].Enter(Phase::kBackward, now_);
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(now_ - last, absl::Seconds(30));
  EXPECT_EQ(hang->local_rank, 1);
  EXPECT_FALSE(hang->waits_for_peers);
}

TEST_F(HangDetectorTest, ANodeAloneHasNobodyElseToWaitFor) {
  Begin(kOneNode);
  Train(20);
  const absl::Time last = now_;
  for (FakeRank& rank : ranks_) rank.Enter(Phase::kBackward, now_);
  ASSERT_TRUE(Wait(absl::Hours(1)).has_value());
  EXPECT_EQ(now_ - last, absl::Seconds(30));
}

TEST_F(HangDetectorTest, AnAgentThatWasStoppedItselfAccusesNobody) {
  Begin();
  Train(20);
  now_ += absl::Hours(3);  // no look at all; the workers stood still too
  EXPECT_EQ(Wait(absl::Seconds(29)), std::nullopt);
  EXPECT_TRUE(Wait(absl::Seconds(1)).has_value());
}

TEST_F(HangDetectorTest, WhoHasEndedIsNotHung) {
  Begin();
  Train(20);
  detector_.Forget(0);
  detector_.Forget(1);
  for (int i = 0; i < 1000; ++i, now_ += kLookPeriod) {
    ASSERT_EQ(detector_.Check(now_), std::nullopt);
  }
}

TEST_F(HangDetectorTest, ARankThatWasAskedToStopMaySaveItsCheckpoint) {
  Begin();
  Train(20);
  for (FakeRank& rank : ranks_) rank.page.stopped_as_asked = true;
  EXPECT_EQ(Wait(absl::Minutes(9)), std::nullopt);
}

TEST_F(HangDetectorTest, AProgramThatIsNoneOfOursIsNotWatched) {
  Begin();
  ranks_[1].page.worker = HealthPage::Worker::kNotAttached;
  for (int i = 1; i <= 20; ++i) {
    EXPECT_EQ(Wait(absl::Seconds(1)), std::nullopt);
    ranks_[0].Commit(i, now_);
  }
  for (int i = 21; i < 1000; ++i) {
    ASSERT_EQ(Wait(absl::Seconds(1)), std::nullopt);
    ranks_[0].Commit(i, now_);
  }
}

class NoHangDetectorTest : public HangDetectorTest {
 protected:
  NoHangDetectorTest() : HangDetectorTest({.floor = absl::ZeroDuration()}) {}
};

TEST_F(NoHangDetectorTest, AFloorOfZeroTurnsItOff) {
  Begin();
  for (int i = 1; i < 100; ++i) ranks_[0].Commit(i, now_);
  detector_.Observe(0, ranks_[0].page, now_);
  EXPECT_EQ(detector_.Check(now_ + absl::Hours(100)), std::nullopt);
}

TEST_F(HangDetectorTest, AHostilePageDoesNotTurnDetectionOffForOthers) {
  Begin();
  Train(20);
  for (const int64_t lie :
       {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min(), int64_t{-1}}) {
    HealthPage::Snapshot& page = ranks_[0].page;
    page.step = page.first_step = page.last_commit_monotonic_ns = lie;
    page.phase_start_monotonic_ns = page.step_start_monotonic_ns = lie;
    page.commits = page.longest_step_us = std::numeric_limits<int64_t>::max();
    EXPECT_EQ(Wait(absl::ZeroDuration()), std::nullopt);
  }
  // The claim is bounded by the time in which the step was committed.
  const auto hang = Wait(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_LE(hang->longest_step, absl::Seconds(2));
}

// A save takes an hour. Its writer reports progress every minute, and the other rank waits.
TEST_F(HangDetectorTest, ACheckpointThatMakesProgressIsNoHang) {
  for (const Phase waiting : {Phase::kCheckpoint, Phase::kSynchronize}) {
    Begin();
    Train(20);
    ranks_[0].Enter(Phase::kCheckpoint, now_);
    ranks_[1].Enter(waiting, now_);
    for (int minute = 0; minute < 60; ++minute) {
      ASSERT_EQ(Wait(absl::Minutes(1)), std::nullopt) << "minute " << minute;
      ranks_[0].Enter(Phase::kCheckpoint, now_);
    }
    // No more progress.
    const absl::Time last = now_;
    const auto hang = Wait(absl::Hours(1));
    ASSERT_TRUE(hang.has_value());
    EXPECT_EQ(now_ - last, absl::Minutes(10));
  }
}

}  // namespace
}  // namespace ddp::elastic
