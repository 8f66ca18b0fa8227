#include "testing/simulator/training_model.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <map>
#include <vector>

#include "elastic/health/phase.h"
#include "elastic/rendezvous/round.h"
#include "testing/simulator/event_queue.h"
#include "testing/simulator/random.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {
namespace {

constexpr int64_t kSecond = 1000000;

class TrainingModelTest : public ::testing::Test {
 protected:
  TrainingModelTest() {
    story_.training_s = 10;
    story_.steps_per_second = 10;
    story_.checkpoint_every = 10;
    story_.victim_chance = 0;
    story_.stubborn_chance = 0;
    story_.stop_aware_chance = 1;
    story_.worker_start_s = 0.001;
  }

  // Starts a worker on each of two nodes.
  void StartBoth(TrainingModel& model, uint64_t generation) {
    for (int node = 0; node < 2; ++node) {
      elastic::Round round;
      round.generation = {generation, "n"};
      round.placement.first_rank = node;
      round.placement.world_size = 2;
      model.Start(node, 0, round);
    }
  }
  void RunFor(int64_t us) {
    const int64_t until_us = queue_.now_us() + us;
    queue_.At(until_us, [] {});
    while (queue_.RunNext(until_us)) {
    }
  }

  Story story_;
  EventQueue queue_;
  const Trace trace_{&queue_, nullptr};
  std::vector<TrainingModel::Exit> exits_;

  TrainingModel MakeModel() {
    return TrainingModel(&story_, &queue_, Random(1), &trace_,
                         [this](const TrainingModel::Exit& exit) { exits_.push_back(exit); });
  }
};

TEST_F(TrainingModelTest, AllWorkersEndWhenAllIsTrained) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(5 * kSecond);
  EXPECT_NEAR(model.step(0), 50, 2);
  RunFor(10 * kSecond);
  ASSERT_EQ(exits_.size(), 2);
  EXPECT_TRUE(exits_[0].status.succeeded() && !exits_[0].stopped_as_asked);
  EXPECT_TRUE(model.all_trained());
}

TEST_F(TrainingModelTest, ALostRankStopsTheOthersWhichWaitUntilTheyAreKilled) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(5 * kSecond + kSecond / 20);
  ASSERT_TRUE(model.Crash(1));
  RunFor(100 * kSecond);
  ASSERT_EQ(exits_.size(), 1);
  EXPECT_TRUE(exits_[0].by_itself);
  EXPECT_NEAR(model.step(0), 50, 2);
  model.Signal(0, 0, SIGTERM);
  RunFor(kSecond);
  ASSERT_EQ(exits_.size(), 2);
  EXPECT_EQ(exits_[1].status.signal, SIGTERM);
  EXPECT_FALSE(exits_[1].by_itself);
}

TEST_F(TrainingModelTest, PeersOfALostRankMayFailAsVictims) {
  story_.victim_chance = 1;
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(5 * kSecond);
  model.Vanish(1);
  RunFor(kSecond);
  ASSERT_EQ(exits_.size(), 2);
  EXPECT_TRUE(exits_[0].with_its_node);
  EXPECT_EQ(exits_[1].node, 0);
  EXPECT_EQ(exits_[1].status.exit_code, 1);
}

TEST_F(TrainingModelTest, AGenerationBeginsAtTheCheckpoint) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(5 * kSecond + kSecond / 2);
  model.Vanish(0);
  model.Vanish(1);
  StartBoth(model, 2);
  RunFor(kSecond / 20);
  EXPECT_EQ(model.step(0), 50);
}

TEST_F(TrainingModelTest, AllStopAfterTheSameStepWhenTheyAreAsked) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(2 * kSecond);
  model.Stop(0, {0}, 33, SIGTERM);
  model.Stop(1, {0}, 33, SIGTERM);
  RunFor(3 * kSecond);
  ASSERT_EQ(exits_.size(), 2);
  EXPECT_TRUE(exits_[0].stopped_as_asked && exits_[1].stopped_as_asked);
  StartBoth(model, 2);
  RunFor(kSecond / 50);
  EXPECT_EQ(model.step(0), 33);
}

TEST_F(TrainingModelTest, AWorkerThatHangsHoldsTheOthersUpAndItsPageTellsWhoItIs) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(kSecond / 2);
  EXPECT_EQ(model.Hang(1), nullptr) << "too few steps";
  RunFor(5 * kSecond);
  ASSERT_NE(model.Hang(1), nullptr);
  const int64_t step = model.step(0);
  RunFor(60 * kSecond);
  EXPECT_EQ(model.step(0), step);
  EXPECT_EQ(model.Page(0, 0)->phase, elastic::Phase::kSynchronize);
  EXPECT_EQ(model.Page(1, 0)->phase, elastic::Phase::kForward);
  EXPECT_NEAR(static_cast<double>(model.Page(1, 0)->step_start_monotonic_ns) / 1e9, 5.5, 0.2);
  model.Signal(1, 0, SIGTERM);
  RunFor(kSecond);
  ASSERT_EQ(exits_.size(), 1);
  EXPECT_TRUE(exits_[0].hung);
}

TEST_F(TrainingModelTest, ASlowHostSlowsAll) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(2 * kSecond);
  model.Slow(1, 2);
  RunFor(4 * kSecond);
  EXPECT_NEAR(model.step(0), 40, 2);
  EXPECT_EQ(model.busy_us(0), 100000);
  EXPECT_EQ(model.busy_us(1), 200000);
}

TEST_F(TrainingModelTest, AFrozenHostHoldsTheOthersUp) {
  TrainingModel model = MakeModel();
  StartBoth(model, 1);
  RunFor(5 * kSecond);
  model.Freeze(1);
  RunFor(60 * kSecond);
  EXPECT_NEAR(model.step(0), 50, 2);
  model.Thaw(1);
  RunFor(7 * kSecond);
  EXPECT_EQ(exits_.size(), 2);
}

}  // namespace
}  // namespace ddp::testing
