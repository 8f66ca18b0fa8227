#include "ddp/reducer/iteration_timer.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

// Runs a whole iteration that begins at `start`. Its forward takes 100 ns. Its backward takes 50 ns
// until the first bucket starts, and 30 ns more until the last gradient. All sums are there 20 ns
// later.
void RunIteration(IterationTimer& timer, int64_t iteration, int64_t start) {
  timer.StartIteration(iteration, start);
  timer.StartBackward(start + 100);
  timer.StartCommunication(start + 150);
  timer.StartCommunication(start + 170);  // the second bucket
  timer.EndCompute(start + 180);
  timer.EndCommunication(start + 200);
}

TEST(IterationTimerTest, DividesAStepIntoItsPhases) {
  IterationTimer timer;
  EXPECT_EQ(timer.overlap_ratio(), 0);
  EXPECT_EQ(timer.average().forward_compute, 0);
  RunIteration(timer, 1, 1000);
  EXPECT_EQ(timer.samples(), 1);
  EXPECT_EQ(timer.last().forward_compute, 100);
  EXPECT_EQ(timer.last().backward_compute, 80);
  EXPECT_EQ(timer.last().backward_comm, 50);
  EXPECT_EQ(timer.last().backward_compute_comm_overlap, 30);
  EXPECT_DOUBLE_EQ(timer.overlap_ratio(), 0.6);
  EXPECT_EQ(timer.stamps().forward_compute_start, 1000);
  EXPECT_EQ(timer.stamps().backward_compute_start, 1100);
  EXPECT_EQ(timer.stamps().backward_comm_start, 1150);
  EXPECT_EQ(timer.stamps().backward_compute_end, 1180);
  EXPECT_EQ(timer.stamps().backward_comm_end, 1200);
}

TEST(IterationTimerTest, AveragesOverTheSamples) {
  IterationTimer timer;
  RunIteration(timer, 1, 0);
  timer.StartIteration(2, 1000);
  timer.StartBackward(1300);
  timer.StartCommunication(1400);
  timer.EndCompute(1400);  // with a single bucket, nothing overlaps
  timer.EndCommunication(1450);
  EXPECT_EQ(timer.samples(), 2);
  EXPECT_EQ(timer.last().forward_compute, 300);
  EXPECT_EQ(timer.average().forward_compute, 200);
  EXPECT_EQ(timer.average().backward_compute, 90);
  EXPECT_EQ(timer.average().backward_comm, 50);
  EXPECT_EQ(timer.average().backward_compute_comm_overlap, 15);
  EXPECT_DOUBLE_EQ(timer.overlap_ratio(), 0.3);
}

TEST(IterationTimerTest, SamplesTheFirstTenAndThenEveryHundredth) {
  IterationTimer timer;
  for (int64_t iteration = 1; iteration <= 1000; ++iteration) {
    RunIteration(timer, iteration, 1000 * iteration);
    EXPECT_EQ(timer.IsSampled(iteration), iteration <= 10 || iteration % 100 == 0);
  }
  EXPECT_EQ(timer.samples(), 20);
  EXPECT_FALSE(timer.IsSampled(0));
}

TEST(IterationTimerTest, AnIterationThatIsNotSampledChangesNothing) {
  IterationTimer timer;
  RunIteration(timer, 10, 0);
  RunIteration(timer, 11, 5000);
  EXPECT_FALSE(timer.active());
  EXPECT_EQ(timer.samples(), 1);
  EXPECT_EQ(timer.stamps().forward_compute_start, 0);
}

TEST(IterationTimerTest, TheSampleRateIsAtLeastOne) {
  IterationTimer timer;
  for (const int64_t rate : {0, -5}) {
    const absl::Status status = timer.SetSampleRate(rate);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find("at least 1"), std::string::npos) << status;
  }
  EXPECT_FALSE(timer.IsSampled(12));
  ASSERT_TRUE(timer.SetSampleRate(3).ok());
  EXPECT_TRUE(timer.IsSampled(7));
  EXPECT_TRUE(timer.IsSampled(12));
  EXPECT_FALSE(timer.IsSampled(13));
  ASSERT_TRUE(timer.SetSampleRate(1).ok());
  EXPECT_TRUE(timer.IsSampled(13));
}

TEST(IterationTimerTest, WhatIsIncompleteIsNoSample) {
  IterationTimer timer;
  // A forward without a backward, then a whole iteration.
  timer.StartIteration(1, 0);
  timer.StartBackward(10);
  RunIteration(timer, 2, 100);
  EXPECT_EQ(timer.samples(), 1);

  // A sampled forward that throws, then an iteration that is not sampled.
  timer.StartIteration(10, 500);
  timer.StartIteration(11, 0);
  EXPECT_FALSE(timer.active());
  timer.StartBackward(700);
  EXPECT_FALSE(timer.active());

  // The backward ends in an exception after its first bucket.
  timer.StartIteration(3, 1000);
  timer.StartBackward(1010);
  timer.StartCommunication(1020);
  EXPECT_TRUE(timer.active());
  timer.StartIteration(4, 2000);
  timer.EndCommunication(2010);  // out of order
  EXPECT_FALSE(timer.active());
  timer.EndCompute(2020);
  EXPECT_EQ(timer.samples(), 1);
  EXPECT_EQ(timer.last().forward_compute, 100);
}

}  // namespace
}  // namespace ddp::internal
