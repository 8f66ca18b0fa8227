// Runs the example under the real ddprun: two trainers and a server, and the loss of each of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;
using launcher::LastLine;

class HybridTest : public launcher::ExampleCase {
 protected:
  // Returns ddprun's options for a job with checkpoints in the folder `name`.
  DdprunDriver::Options Job(const std::string& name) const {
    return {.arguments = {"--nproc-per-node=3", "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), folder_ / name}};
  }
};

TEST_F(HybridTest, LearnsAndContinuesBitByBitAfterTheLossOfAnyRank) {
  DdprunDriver peaceful(Job("peaceful"));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();
  // The ratings have a variance of 1.
  EXPECT_THAT(LastLine(peaceful.out()), ::testing::StartsWith("step 400 loss 0.0"));

  // A trainer, then the server, then the other trainer, each in a generation of its own.
  DdprunDriver run(Job("killed"));
  const std::vector<int> victims = {1, 2, 0};
  for (size_t i = 0; i < victims.size(); ++i) {
    run.AwaitStdout("step " + std::to_string(50 * (i + 1)) + " ");
    ASSERT_EQ(::kill(PidOf("killed", i + 1, victims[i]), SIGKILL), 0);
    run.AwaitStderr("restart " + std::to_string(i + 1) + " of 3");
  }
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(launcher::Count(run.out(), "step 10 "), 1);  // nobody began at the first step again
  EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
}

TEST_F(HybridTest, OneRankIsTooFew) {
  DdprunDriver run({.arguments = {"--nproc-per-node=1", Trainer()}});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), ::testing::HasSubstr("a server and a trainer are two ranks at least"));
}

}  // namespace
}  // namespace ddp::examples
