// Runs the example under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;
using launcher::LastLine;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ZeroTest : public launcher::ExampleCase {
 protected:
  // Returns ddprun's options for a job with checkpoints in the folder `name`.
  DdprunDriver::Options Job(const std::string& name, int ranks = 2, int epochs = 50) const {
    return {.arguments = {"--nproc-per-node=" + std::to_string(ranks), "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), folder_ / name,
                          std::to_string(epochs)}};
  }
};

// Returns the loss of the last epoch.
double LastLoss(const std::string& out) {
  const std::string line = LastLine(out);
  const size_t at = line.find("loss ");
  return at == std::string::npos ? NAN : std::stod(line.substr(at + 5));
}

// The net has 4,353 parameters, AdamW has two moments of four bytes. On one rank the optimizer is
// a plain AdamW; the gradients of two ranks differ in the last bits.
TEST_F(ZeroTest, TwoRanksTrainAsOneWithHalfOfItsStateEach) {
  DdprunDriver one(Job("one", 1));
  ASSERT_EQ(one.Wait(), 0) << one.err();
  EXPECT_THAT(one.err(), HasSubstr("rank 0 of 1: 34824 bytes of optimizer state"));
  DdprunDriver two(Job("two"));
  ASSERT_EQ(two.Wait(), 0) << two.err();
  EXPECT_THAT(two.err(), HasSubstr("rank 0 of 2: 17416 bytes of optimizer state"));
  EXPECT_THAT(two.err(), HasSubstr("rank 1 of 2: 17408 bytes of optimizer state"));
  EXPECT_THAT(LastLine(two.out()), StartsWith("epoch 49 loss 0.0"));
  EXPECT_NEAR(LastLoss(two.out()), LastLoss(one.out()), 1e-4);
}

class ZeroKillTest : public ZeroTest, public ::testing::WithParamInterface<int> {};

// Rank 0 writes the newest values of its part, the manifest and the output.
TEST_P(ZeroKillTest, SurvivesAKill) {
  ExpectTheSameAfterAKill([&](const std::string& name) { return Job(name); }, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, ZeroKillTest, ::testing::Values(0, 1));

TEST_F(ZeroTest, ContinuesOnAnotherNumberOfRanks) {
  DdprunDriver undisturbed(Job("undisturbed", 2, 40));
  ASSERT_EQ(undisturbed.Wait(), 0) << undisturbed.err();
  DdprunDriver three(Job("moved", 3, 20));
  ASSERT_EQ(three.Wait(), 0) << three.err();
  DdprunDriver two(Job("moved", 2, 40));
  ASSERT_EQ(two.Wait(), 0) << two.err();
  EXPECT_EQ(launcher::Count(two.out(), "epoch 19 "), 0) << two.out();
  EXPECT_THAT(LastLine(two.out()), StartsWith("epoch 39 loss 0."));
  EXPECT_THAT(two.err(), HasSubstr("rank 1 of 2: 17408 bytes of optimizer state"));
  EXPECT_NEAR(LastLoss(two.out()), LastLoss(undisturbed.out()), 1e-4);
}

}  // namespace
}  // namespace ddp::examples
