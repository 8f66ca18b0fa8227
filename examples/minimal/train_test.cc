// The example that users copy does what it says, under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "launcher/ddprun_driver.h"

namespace ddp::examples {
namespace {

TEST(MinimalTest, FindsTheLine) {
  // Named by the BUILD file, so that a copy of this folder tests the copy.
  launcher::DdprunDriver run({.arguments = {"--nproc-per-node=2", std::getenv("TRAINER")}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), ::testing::ContainsRegex("epoch 4 loss 0\\.000[0-9]+ "
                                                  "weight (2\\.9[0-9]+|3\\.0[0-9]+) "
                                                  "bias (0\\.9[0-9]+|1\\.0[0-9]+)\n"));
}

}  // namespace
}  // namespace ddp::examples
