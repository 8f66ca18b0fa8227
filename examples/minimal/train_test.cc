// Runs the example that users copy, under the real ddprun.
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

// The BUILD file sets the path, so that a copy of this folder tests the copy.
std::string Trainer() { return std::getenv("TRAINER"); }

class MinimalTest : public ::testing::Test {
 protected:
  MinimalTest()
      : folder_(fs::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }

  // Returns ddprun's options: 2 ranks, 1,000 epochs, checkpoints in the folder `name`.
  DdprunDriver::Options LongJob(const std::string& name) const {
    return {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), folder_ / name, "1000"}};
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

TEST_F(MinimalTest, FindsTheLine) {
  DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer()}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::ContainsRegex("epoch 4 loss 0\\.000[0-9]+ "
                                                  "weight (2\\.9[0-9]+|3\\.0[0-9]+) "
                                                  "bias (0\\.9[0-9]+|1\\.0[0-9]+)\n"));
}

TEST_F(MinimalTest, SurvivesAKill) {
  DdprunDriver peaceful(LongJob("peaceful"));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();

  DdprunDriver run(LongJob("killed"));
  run.AwaitStdout("epoch 20 ");
  ASSERT_EQ(::kill(PidOf("killed", 1, 1), SIGKILL), 0);
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), ::testing::HasSubstr("restart 1 of 3"));
  // The restarted generation has not started from the first epoch.
  EXPECT_EQ(launcher::Count(run.out(), "epoch 0 "), 1);
  EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
}

}  // namespace
}  // namespace ddp::examples
