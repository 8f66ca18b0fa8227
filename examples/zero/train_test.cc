// Runs the example under the real ddprun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;
using launcher::LastLine;
using ::testing::HasSubstr;

constexpr char kEpochs[] = "80";

class ZeroTest : public launcher::ExampleCase {
 protected:
  // Returns ddprun's options for a job with checkpoints in the folder `name`.
  DdprunDriver::Options Job(const std::string& name, const std::string& epochs = kEpochs,
                            const std::string& optimizer = "zero", int ranks = 2) const {
    return {.arguments = {"--nproc-per-node=" + std::to_string(ranks), "--max-restarts=3",
                          "--event-log-file=" + EventLog(name), Trainer(), folder_ / name, epochs,
                          optimizer}};
  }
};

// The net has 4,353 parameters, AdamW has two moments of four bytes.
TEST_F(ZeroTest, TrainsAsThePlainOptimizerWithHalfOfItsState) {
  DdprunDriver plain(Job("plain", kEpochs, "plain"));
  ASSERT_EQ(plain.Wait(), 0) << plain.err();
  EXPECT_THAT(plain.err(), HasSubstr("rank 0 of 2: 34824 bytes of optimizer state"));
  DdprunDriver zero(Job("zero"));
  ASSERT_EQ(zero.Wait(), 0) << zero.err();
  EXPECT_THAT(zero.err(), HasSubstr("rank 0 of 2: 17416 bytes of optimizer state"));
  EXPECT_THAT(zero.err(), HasSubstr("rank 1 of 2: 17408 bytes of optimizer state"));
  EXPECT_THAT(zero.out(), HasSubstr("epoch 79 loss 0.0"));
  EXPECT_EQ(LastLine(zero.out()), LastLine(plain.out()));
}

class ZeroKillTest : public ZeroTest, public ::testing::WithParamInterface<int> {};

// Rank 0 writes the newest values of its part, the manifest and the output.
TEST_P(ZeroKillTest, SurvivesAKill) {
  ExpectTheSameAfterAKill([&](const std::string& name) { return Job(name); }, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, ZeroKillTest, ::testing::Values(0, 1));

// A plain optimizer that moves likewise gives the same result.
TEST_F(ZeroTest, ContinuesOnAnotherNumberOfRanks) {
  std::vector<std::string> results;
  for (const std::string optimizer : {"plain", "zero"}) {
    DdprunDriver three(Job(optimizer, "30", optimizer, 3));
    ASSERT_EQ(three.Wait(), 0) << three.err();
    DdprunDriver two(Job(optimizer, "60", optimizer));
    ASSERT_EQ(two.Wait(), 0) << two.err();
    EXPECT_EQ(launcher::Count(two.out(), "epoch 29 "), 0) << two.out();
    EXPECT_EQ(launcher::Count(two.out(), "epoch 59 "), 1) << two.out();
    EXPECT_THAT(two.err(),
                HasSubstr(optimizer == "zero" ? "rank 1 of 2: 17408 bytes of optimizer state"
                                              : "rank 1 of 2: 34824 bytes of optimizer state"));
    results.push_back(LastLine(two.out()));
  }
  EXPECT_THAT(results[0], HasSubstr("epoch 59 loss 0."));
  EXPECT_EQ(results[1], results[0]);
}

}  // namespace
}  // namespace ddp::examples
