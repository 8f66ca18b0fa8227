// Runs the example with the file that Python wrote, under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;
using launcher::LastLine;

class GraphExampleTest : public launcher::ExampleCase {};

double LossOf(const std::string& line) { return std::stod(line.substr(line.find("loss ") + 5)); }

TEST_F(GraphExampleTest, LearnsWithTheDefaultBackend) {
  DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer(), "--epochs=30"}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::HasSubstr("Net: 3 pieces"));
  EXPECT_THAT(LastLine(run.out()), ::testing::StartsWith("epoch 29 loss "));
  EXPECT_LT(LossOf(LastLine(run.out())), 0.2) << run.out();
}

// The last line has the loss and the buffer that the script assigns.
TEST_F(GraphExampleTest, SurvivesAKill) {
  ExpectTheSameAfterAKill([&](const std::string& name) -> DdprunDriver::Options {
    return {.arguments = {"--nproc-per-node=2", "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), "--epochs=80",
                          "--interpreter", "--checkpoint_dir=" + (folder_ / name).string()}};
  });
}

}  // namespace
}  // namespace ddp::examples
