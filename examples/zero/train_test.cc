// Runs the example under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launcher/end_to_end/ddprun_driver.h"

namespace ddp::examples {
namespace {

namespace fs = std::filesystem;
using launcher::DdprunDriver;
using ::testing::HasSubstr;

constexpr char kEpochs[] = "80";

class ZeroTest : public ::testing::Test {
 protected:
  ZeroTest()
      : folder_(fs::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }

  // Returns ddprun's options for a job with checkpoints in the folder `name`.
  DdprunDriver::Options Job(const std::string& name, const std::string& epochs = kEpochs,
                            const std::string& optimizer = "zero", int ranks = 2) const {
    return {.arguments = {"--nproc-per-node=" + std::to_string(ranks), "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), std::getenv("TRAINER"),
                          folder_ / name, epochs, optimizer}};
  }

  std::string EventLog(const std::string& name) const { return folder_ / (name + ".events"); }

  pid_t PidOf(const std::string& name, uint64_t generation, size_t rank) const {
    std::ifstream log(EventLog(name));
    for (std::string line; std::getline(log, line);) {
      const nlohmann::json event = nlohmann::json::parse(line);
      if (event["event"] == "generation_started" && event["generation"] == generation) {
        return event["pids"][rank];
      }
    }
    return -1;
  }

  const fs::path folder_;
};

std::string LastLine(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  return text.substr(text.rfind('\n', end) + 1);
}

// The net has 4,353 parameters, AdamW has two moments of four bytes.
TEST_F(ZeroTest, TrainsAsThePlainOptimizerWithHalfOfItsState) {
  DdprunDriver plain(Job("plain", kEpochs, "plain"));
  ASSERT_EQ(plain.Wait(), 0) << plain.err();
  EXPECT_THAT(plain.err(), HasSubstr("rank 0 of 2: 34824 bytes of optimizer state"));
  DdprunDriver zero(Job("zero"));
  ASSERT_EQ(zero.Wait(), 0) << zero.err();
  EXPECT_THAT(zero.err(), HasSubstr("rank 0 of 2: 17416 bytes of optimizer state"));
  EXPECT_THAT(zero.err(), HasSubstr("rank 1 of 2: 17408 bytes of optimizer state"));
  EXPECT_THAT(zero.out(), HasSubstr("epoch 79 loss 0.0"));
  EXPECT_EQ(LastLine(zero.out()), LastLine(plain.out()));
}

// Rank 0 writes the newest values of its part, the manifest and the output.
TEST_F(ZeroTest, SurvivesAKillOfEitherRank) {
  DdprunDriver peaceful(Job("peaceful"));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();
  for (const size_t rank : {0, 1}) {
    const std::string name = "killed-" + std::to_string(rank);
    DdprunDriver run(Job(name));
    run.AwaitStdout("epoch 20 ");
    ASSERT_EQ(::kill(PidOf(name, 1, rank), SIGKILL), 0);
    EXPECT_EQ(run.Wait(), 0) << run.err();
    EXPECT_THAT(run.err(), HasSubstr("restart 1 of 3"));
    EXPECT_EQ(launcher::Count(run.out(), "epoch 0 "), 1);
    EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
  }
}

// A plain optimizer that moves likewise gives the same result.
TEST_F(ZeroTest, ContinuesOnAnotherNumberOfRanks) {
  std::vector<std::string> results;
  for (const std::string optimizer : {"plain", "zero"}) {
    DdprunDriver three(Job(optimizer, "30", optimizer, 3));
    ASSERT_EQ(three.Wait(), 0) << three.err();
    DdprunDriver two(Job(optimizer, "60", optimizer));
    ASSERT_EQ(two.Wait(), 0) << two.err();
    EXPECT_EQ(launcher::Count(two.out(), "epoch 29 "), 0) << two.out();
    EXPECT_EQ(launcher::Count(two.out(), "epoch 59 "), 1) << two.out();
    EXPECT_THAT(two.err(),
                HasSubstr(optimizer == "zero" ? "rank 1 of 2: 17408 bytes of optimizer state"
                                              : "rank 1 of 2: 34824 bytes of optimizer state"));
    results.push_back(LastLine(two.out()));
  }
  EXPECT_THAT(results[0], HasSubstr("epoch 59 loss 0."));
  EXPECT_EQ(results[1], results[0]);
}

}  // namespace
}  // namespace ddp::examples
