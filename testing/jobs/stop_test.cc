// The trainer is asked to stop, as ddprun does when nodes come or leave. No step is lost.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"
#include "store/redis/redis_endpoint.h"
#include "testing/jobs/checkpoint_files.h"
#include "testing/ranks/rank_harness.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::testing {
namespace {

namespace fs = std::filesystem;
using elastic::HealthPage;
using elastic::Phase;

constexpr int kRanks = 2;
constexpr int64_t kStepsPerEpoch = 45;

class StopTest : public ::testing::Test {
 protected:
  StopTest() : redis_(RedisFixture::Start()) {
    folder_ = fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::create_directories(folder_);
    for (int rank = 0; rank < kRanks; ++rank) {
      pages_.push_back(HealthPage::Create().value());
      EXPECT_EQ(fcntl(pages_.back().fd(), F_SETFD, 0), 0);  // the ranks inherit it
    }
  }

  // Runs two epochs, or the rest of them, as generation `generation` of the job whose checkpoints
  // are in `name`.
  RankRun Train(const std::string& name, uint64_t generation) {
    // Each rank finds its own page, as under ddprun.
    RankJob job = {
        .world_size = kRanks,
        .argv = {"/bin/sh", "-c", "eval export DDP_HEALTH_FD=\\$PAGE_$RANK; exec \"$@\"", "sh",
                 "testing/jobs/logging_trainer", "--epochs=2", "--checkpoint_every=20",
                 "--checkpoint_dir=" + (folder_ / name).string()},
        .store_url = store::FormatStoreAddress(redis_->Address(absl::StrCat(name, generation))),
        .environment = {{"DDP_GENERATION", absl::StrCat(generation)}},
    };
    for (int rank = 0; rank < kRanks; ++rank) {
      job.environment[absl::StrCat("PAGE_", rank)] = absl::StrCat(pages_[rank].fd());
    }
    return RunRanks(job);
  }

  void BeginGeneration(uint64_t generation) {
    for (HealthPage& page : pages_) page.BeginGeneration(generation);
  }

  const std::unique_ptr<RedisFixture> redis_;
  fs::path folder_;
  std::vector<HealthPage> pages_;
};

TEST_F(StopTest, AGenerationThatMakesWayLosesNoStep) {
  BeginGeneration(1);
  const RankRun whole = Train("whole", 1);
  ASSERT_TRUE(whole.succeeded()) << whole.Describe();
  for (const HealthPage& page : pages_) {
    EXPECT_TRUE(page.Read().stop_aware);
    EXPECT_FALSE(page.Read().stopped_as_asked);
    EXPECT_EQ(page.Read().step, 2 * kStepsPerEpoch);
    for (const Phase phase : {Phase::kData, Phase::kForward, Phase::kBackward, Phase::kOptimizer,
                              Phase::kCheckpoint, Phase::kEvaluation}) {
      EXPECT_GT(page.Read().phase_total_us[static_cast<size_t>(phase)], 0) << PhaseName(phase);
    }
  }

  BeginGeneration(1);
  for (HealthPage& page : pages_) page.RequestStop(33);
  const RankRun first = Train("in_parts", 1);
  ASSERT_TRUE(first.succeeded()) << first.Describe();
  EXPECT_EQ(NewestCheckpoint(folder_ / "in_parts").filename(), "step-000000000033.g0001");
  for (const HealthPage& page : pages_) {
    EXPECT_TRUE(page.Read().stopped_as_asked);
    EXPECT_EQ(page.Read().step, 33);
  }

  BeginGeneration(2);
  const RankRun second = Train("in_parts", 2);
  ASSERT_TRUE(second.succeeded()) << second.Describe();
  for (const HealthPage& page : pages_) {
    EXPECT_EQ(page.Read().first_step, 34);
    EXPECT_EQ(page.Read().step, 2 * kStepsPerEpoch);
  }
  EXPECT_EQ(NewestTensors(folder_ / "in_parts").size(),
            4u);  // model, optimizer, two ranks' generators
  EXPECT_TRUE(NewestTensors(folder_ / "in_parts") == NewestTensors(folder_ / "whole"));
}

}  // namespace
}  // namespace ddp::testing
