// Runs the example under the real ddprun: the result does not depend on the number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "launcher/end_to_end/ddprun_driver.h"

namespace ddp::examples {
namespace {

std::string OutputOf(int ranks) {
  launcher::DdprunDriver run(
      {.arguments = {"--nproc-per-node=" + std::to_string(ranks), std::getenv("TRAINER")}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  return run.out();
}

TEST(SyncBatchNormExampleTest, AnyNumberOfRanksGivesOneResult) {
  const std::string alone = OutputOf(1);
  EXPECT_THAT(alone, ::testing::ContainsRegex("epoch 19 loss 0\\.[01][0-9]+ running mean"));
  EXPECT_EQ(OutputOf(2), alone);
  EXPECT_EQ(OutputOf(4), alone);
}

}  // namespace
}  // namespace ddp::examples
