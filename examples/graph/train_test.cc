// Runs the example with the file that Python wrote, under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <string>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;
using launcher::LastLine;

class GraphExampleTest : public launcher::ExampleCase {};

std::string TracedModel() { return std::getenv("TRACED_MODEL"); }

double LossOf(const std::string& line) { return std::stod(line.substr(line.find("loss ") + 5)); }

TEST_F(GraphExampleTest, LearnsWithTheDefaultBackend) {
  DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer(), "--epochs=30"}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::HasSubstr("Net: 3 pieces"));
  EXPECT_THAT(LastLine(run.out()), ::testing::StartsWith("epoch 29 loss "));
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

class GraphExampleKillTest : public GraphExampleTest, public ::testing::WithParamInterface<int> {};

// The last line has the loss and the buffer that the script assigns.
TEST_P(GraphExampleKillTest, ContinuesWithEqualBits) {
  const auto job = [&](const std::string& name) -> DdprunDriver::Options {
    return {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), "--epochs=60",
                          "--interpreter", "--checkpoint_dir=" + (folder_ / name).string()}};
  };
  ExpectTheSameAfterAKill(job, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, GraphExampleKillTest, ::testing::Values(0, 1));

// A restarted job of the default backend makes profiling runs again, so only the last bits differ
// from those of an undisturbed job. All samples of an epoch are seen once.
TEST_F(GraphExampleTest, SurvivesAKillWithTheDefaultBackend) {
  DdprunDriver run(
      {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                     "--event-log-file=" + EventLog("killed"), Trainer(), "--epochs=30",
                     "--checkpoint_dir=" + (folder_ / "checkpoints").string()}});
  run.AwaitStdout("epoch 10 ");
  ASSERT_EQ(::kill(PidOf("killed", 1, 0), SIGKILL), 0);
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), ::testing::HasSubstr("restart 1 of 3"));
  EXPECT_EQ(launcher::Count(run.out(), "epoch 0 "), 1);
  EXPECT_THAT(LastLine(run.out()), ::testing::StartsWith("epoch 29 loss "));
  EXPECT_THAT(LastLine(run.out()), ::testing::HasSubstr("seen 15000"));  // half of 30 epochs
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

TEST_F(GraphExampleTest, TrainsAFileOfJitTrace) {
  DdprunDriver run(
      {.arguments = {"--nproc-per-node=2", Trainer(), "--epochs=20", "--model=" + TracedModel()}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::HasSubstr("Traced: 3 pieces"));
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

}  // namespace
}  // namespace ddp::examples
