// Runs the example that users copy, under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;

class MinimalTest : public launcher::ExampleCase {
 protected:
  // Returns ddprun's options: 2 ranks, 1,000 epochs, checkpoints in the folder `name`.
  DdprunDriver::Options LongJob(const std::string& name) const {
    return {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), folder_ / name, "1000"}};
  }
};

TEST_F(MinimalTest, FindsTheLine) {
  DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer()}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::ContainsRegex("epoch 4 loss 0\\.000[0-9]+ "
                                                  "weight (2\\.9[0-9]+|3\\.0[0-9]+) "
                                                  "bias (0\\.9[0-9]+|1\\.0[0-9]+)\n"));
}

// A folder of that name would be found weeks later.
TEST_F(MinimalTest, AFlagIsNoFolder) {
  DdprunDriver run({.arguments = {"--nproc-per-node=1", Trainer(), "--lr=0.1"}});
  EXPECT_NE(run.Wait(), 0);
  EXPECT_THAT(run.err(), ::testing::HasSubstr("usage: train [FOLDER_FOR_CHECKPOINTS [EPOCHS]]"));
}

TEST_F(MinimalTest, SurvivesAKill) {
  ExpectTheSameAfterAKill([&](const std::string& name) { return LongJob(name); });
}

}  // namespace
}  // namespace ddp::examples
