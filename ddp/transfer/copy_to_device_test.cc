#include "ddp/transfer/copy_to_device.h"

#include <cstdint>
#include <cstdlib>
#include <vector>

#include <ATen/Functions.h>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"

namespace ddp::internal {
namespace {

TEST(CopyToDeviceTest, ATensorThatIsThereAlreadyIsNotCopied) {
  const at::Tensor tensor = at::ones({2});
  EXPECT_TRUE(CopyToDevice(tensor, at::kCPU).is_same(tensor));
}

// Only copies from the CPU to an accelerator need a stream.
TEST(CopyToDeviceTest, OtherDevicesNeedNoSideStream) {
  const at::Tensor moved = CopyToDevice(at::ones({2}, at::kDouble), at::kMeta);
  EXPECT_TRUE(moved.is_meta());
  EXPECT_EQ(moved.scalar_type(), at::kDouble);
}

// More copies than there are side streams: each stream then has memory that it may give to the
// next.
TEST(CopyToDeviceTest, CopiesAreOrderedBeforeTheCurrentStreamsWorkAndAfterItsUse) {
  constexpr int kCopies = 3 * testing::Runtime::kPoolStreams;
  for (const char* side_stream : {"1", "0"}) {
    setenv("PYTORCH_DDP_USE_SIDE_STREAM", side_stream, /*overwrite=*/1);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      testing::InstallAccelerator({.seed = seed, .lateness = absl::Milliseconds(1)});
      std::vector<at::Tensor> sums;
      for (int i = 0; i < kCopies; ++i) {
        const at::Tensor leaf = at::full({1000}, i, at::kFloat).pin_memory();
        sums.push_back(CopyToDevice(leaf, testing::SimulatedDevice()).sum());
      }
      for (int i = 0; i < kCopies; ++i) {
        EXPECT_EQ(sums[i].item<float>(), 1000.0F * i) << "copy " << i << ", seed " << seed;
      }
    }
  }
}

TEST(CopyToDeviceTest, AGradientGoesBackThroughTheCopy) {
  setenv("PYTORCH_DDP_USE_SIDE_STREAM", "1", /*overwrite=*/1);
  testing::InstallAccelerator({.seed = 1, .lateness = absl::Milliseconds(1)});
  const at::Tensor leaf = at::arange(1000, at::kFloat).requires_grad_();
  const at::Tensor copy = CopyToDevice(leaf, testing::SimulatedDevice());
  EXPECT_EQ(copy.device(), testing::SimulatedDevice());
  EXPECT_TRUE(at::equal(copy.detach().cpu(), leaf.detach()));
  copy.sum().backward();
  EXPECT_EQ(leaf.grad()[7].item<float>(), 1);
}

}  // namespace
}  // namespace ddp::internal
