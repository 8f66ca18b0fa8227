// Runs the example with the file that Python wrote, under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "launcher/end_to_end/ddprun_driver.h"

namespace ddp::examples {
namespace {

namespace fs = std::filesystem;
using launcher::DdprunDriver;

// The BUILD file sets the path, so that a copy of this folder tests the copy.
std::string Trainer() { return std::getenv("TRAINER"); }

std::string TracedModel() { return std::getenv("TRACED_MODEL"); }

fs::path Folder() {
  const fs::path folder = fs::path(::testing::TempDir()) /
                          ::testing::UnitTest::GetInstance()->current_test_info()->name();
  fs::create_directories(folder);
  return folder;
}

pid_t PidOf(const fs::path& events, uint64_t generation, size_t rank) {
  std::ifstream log(events);
  for (std::string line; std::getline(log, line);) {
    const nlohmann::json event = nlohmann::json::parse(line);
    if (event["event"] == "generation_started" && event["generation"] == generation) {
      return event["pids"][rank];
    }
  }
  return -1;
}

std::string LastLine(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  return text.substr(text.rfind('\n', end) + 1);
}

double LossOf(const std::string& line) { return std::stod(line.substr(line.find("loss ") + 5)); }

TEST(GraphExampleTest, LearnsWithTheDefaultBackend) {
  DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer(), "--epochs=30"}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::HasSubstr("Net: 3 pieces"));
  EXPECT_THAT(LastLine(run.out()), ::testing::StartsWith("epoch 29 loss "));
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

TEST(GraphExampleTest, SurvivesAKill) {
  const fs::path folder = Folder();
  const auto arguments = [&](const std::string& name) -> DdprunDriver::Options {
    return {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                          "--event-log-file=" + (folder / (name + ".events")).string(), Trainer(),
                          "--epochs=80", "--interpreter",
                          "--checkpoint_dir=" + (folder / name).string()}};
  };
  DdprunDriver peaceful(arguments("peaceful"));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();

  DdprunDriver run(arguments("killed"));
  run.AwaitStdout("epoch 20 ");
  ASSERT_EQ(::kill(PidOf(folder / "killed.events", 1, 1), SIGKILL), 0);
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), ::testing::HasSubstr("restart 1 of 3"));
  // The restarted generation has not started from the first epoch. Loss and the buffer that the
  // script assigns end as in the undisturbed job.
  EXPECT_EQ(launcher::Count(run.out(), "epoch 0 "), 1);
  EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
}

TEST(GraphExampleTest, SurvivesTheLossOfRank0) {
  const fs::path folder = Folder();
  const auto arguments = [&](const std::string& name) -> DdprunDriver::Options {
    return {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                          "--event-log-file=" + (folder / (name + ".events")).string(), Trainer(),
                          "--epochs=30", "--interpreter",
                          "--checkpoint_dir=" + (folder / name).string()}};
  };
  DdprunDriver peaceful(arguments("peaceful"));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();

  DdprunDriver run(arguments("killed"));
  run.AwaitStdout("epoch 10 ");
  ASSERT_EQ(::kill(PidOf(folder / "killed.events", 1, 0), SIGKILL), 0);
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), ::testing::HasSubstr("restart 1 of 3"));
  EXPECT_EQ(launcher::Count(run.out(), "epoch 0 "), 1);
  EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
}

// A restarted job of the default backend makes profiling runs again, so only the last bits differ
// from those of an undisturbed job. All samples of an epoch are seen once.
TEST(GraphExampleTest, SurvivesAKillWithTheDefaultBackend) {
  const fs::path folder = Folder();
  DdprunDriver run(
      {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                     "--event-log-file=" + (folder / "events").string(), Trainer(), "--epochs=30",
                     "--checkpoint_dir=" + (folder / "checkpoints").string()}});
  run.AwaitStdout("epoch 10 ");
  ASSERT_EQ(::kill(PidOf(folder / "events", 1, 0), SIGKILL), 0);
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), ::testing::HasSubstr("restart 1 of 3"));
  EXPECT_EQ(launcher::Count(run.out(), "epoch 0 "), 1);
  EXPECT_THAT(LastLine(run.out()), ::testing::StartsWith("epoch 29 loss "));
  EXPECT_THAT(LastLine(run.out()), ::testing::HasSubstr("seen 15000"));  // half of 30 epochs
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

TEST(GraphExampleTest, TrainsAFileOfJitTrace) {
  DdprunDriver run(
      {.arguments = {"--nproc-per-node=2", Trainer(), "--epochs=20", "--model=" + TracedModel()}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::HasSubstr("Traced: 3 pieces"));
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

}  // namespace
}  // namespace ddp::examples
