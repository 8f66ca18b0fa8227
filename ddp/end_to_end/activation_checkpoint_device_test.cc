// Checkpointed segments on a device that runs ahead of the host.
#include <cstdint>

#include <torch/torch.h>

#include "absl/time/time.h"
#include "ddp/activation_checkpoint.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"

namespace ddp {
namespace {

// Returns the gradient of an input that passes a dropout, and draws more numbers before the
// backward. `options`: null for a segment without a checkpoint.
torch::Tensor GradientOfDropout(const CheckpointOptions* options) {
  const c10::Device device = testing::SimulatedDevice();
  torch::manual_seed(3);
  const auto segment = [](const torch::Tensor& h) {
    return torch::dropout(h * 2, 0.5, /*train=*/true).square();
  };
  const torch::Tensor x = torch::ones({4096}, torch::requires_grad().device(device));
  const torch::Tensor y = options == nullptr ? segment(x) : checkpoint(*options, segment, x);
  const torch::Tensor later = torch::rand({100}, device);
  y.sum().backward();
  return torch::cat({x.grad(), later}).cpu();
}

TEST(ActivationCheckpointDeviceTest, ADropoutOnADeviceDrawsTheSameMaskAgain) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    testing::InstallAccelerator({.seed = seed, .lateness = absl::Milliseconds(2)});
    const torch::Tensor plain = GradientOfDropout(nullptr);
    EXPECT_NE(plain.narrow(0, 0, 4096).eq(0).sum().item<int64_t>(), 0);
    for (const bool reentrant : {false, true}) {
      const CheckpointOptions options{.use_reentrant = reentrant};
      EXPECT_TRUE(torch::equal(GradientOfDropout(&options), plain))
          << "seed " << seed << (reentrant ? ", reentrant" : "");
    }
  }
}

}  // namespace
}  // namespace ddp
