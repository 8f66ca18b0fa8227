#include "ddp/transfer/copy_to_device.h"

#include <cstdlib>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(CopyToDeviceTest, ATensorThatIsThereAlreadyIsNotCopied) {
  const at::Tensor tensor = at::ones({2});
  EXPECT_TRUE(CopyToDevice(tensor, at::kCPU).is_same(tensor));
}

// Only copies from the CPU to a GPU need a stream.
TEST(CopyToDeviceTest, OtherDevicesNeedNoSideStream) {
  const at::Tensor moved = CopyToDevice(at::ones({2}, at::kDouble), at::kMeta);
  EXPECT_TRUE(moved.is_meta());
  EXPECT_EQ(moved.scalar_type(), at::kDouble);
}

TEST(CopyToDeviceTest, ACopyToAGpuIsOrderedBeforeTheCurrentStreamsWork) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const char* side_stream : {"1", "0"}) {
    setenv("PYTORCH_DDP_USE_SIDE_STREAM", side_stream, /*overwrite=*/1);
    const at::Tensor leaf = at::arange(1 << 20, at::kFloat).requires_grad_();
    const at::Tensor copy = CopyToDevice(leaf, at::Device(at::kCUDA, 0));
    EXPECT_TRUE(copy.is_cuda());
    EXPECT_TRUE(at::equal(copy.detach().cpu(), leaf.detach()));
    copy.sum().backward();
    EXPECT_EQ(leaf.grad()[7].item<float>(), 1);
  }
}

}  // namespace
}  // namespace ddp::internal
