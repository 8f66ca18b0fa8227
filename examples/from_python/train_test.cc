// Runs the twin of a Python program, which docs/from-python.md shows, under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

class FromPythonTest : public launcher::ExampleCase {};

TEST_F(FromPythonTest, LearnsAsThePythonProgramDoes) {
  launcher::DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer(), folder_ / "spirals"}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::ContainsRegex("epoch 9 accuracy (0\\.9[5-9]|1\\.0)"));
}

}  // namespace
}  // namespace ddp::examples
