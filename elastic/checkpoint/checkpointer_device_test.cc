// A training on a device that runs ahead of the host: what is saved is what the device has
// computed, and its random numbers go on where they were.
#include <cstdint>

#include "absl/time/time.h"
#include "elastic/checkpoint/checkpointer_fixture.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"

namespace ddp::elastic {
namespace {

class CheckpointerDeviceTest : public CheckpointerFixture,
                               public ::testing::WithParamInterface<int> {
 protected:
  CheckpointerDeviceTest() {
    ddp::testing::InstallAccelerator(
        {.seed = static_cast<uint64_t>(GetParam()), .lateness = absl::Milliseconds(1)});
  }
};

TEST_P(CheckpointerDeviceTest, ResumesExactly) {
  ExpectResumesExactly(AdamW(), ddp::testing::SimulatedDevice());
}

INSTANTIATE_TEST_SUITE_P(Seeds, CheckpointerDeviceTest, ::testing::Range(0, 5));

}  // namespace
}  // namespace ddp::elastic
