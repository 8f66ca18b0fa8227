#include "testing/accelerator/default_device.h"

#include <vector>

#include <torch/csrc/autograd/engine.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"

namespace ddp::testing {
namespace {

class DefaultDeviceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    InstallAccelerator({});
    SetDefaultDevice(SimulatedDevice(1));
  }
};

TEST_F(DefaultDeviceTest, IsThatOfTensorsWithoutADevice) {
  EXPECT_EQ(torch::ones({2}).device(), SimulatedDevice(1));
  EXPECT_EQ(torch::arange(3, torch::kLong).device(), SimulatedDevice(1));
  EXPECT_EQ(torch::nn::Linear(2, 3)->weight.device(), SimulatedDevice(1));
  EXPECT_EQ(torch::ones({2}, SimulatedDevice(0)).device(), SimulatedDevice(0));
}

TEST_F(DefaultDeviceTest, IsNotThatOfTheHostsTensors) {
  EXPECT_TRUE(at::ones({2}).is_cpu());
  EXPECT_TRUE(torch::ones({2}, torch::kCPU).is_cpu());
  EXPECT_TRUE(torch::ones({2}).cpu().is_cpu());
}

// Autograd's threads, and the callbacks at a backward's end.
TEST_F(DefaultDeviceTest, IsThatOfTensorsInABackward) {
  torch::nn::Linear linear(2, 3);
  std::vector<c10::Device> devices;
  linear->weight.register_hook([&](const torch::Tensor&) {
    devices.push_back(torch::full({1}, 2).device());
    torch::autograd::Engine::get_default_engine().queue_callback(
        [&] { devices.push_back(torch::full({1}, 2.0).device()); });
  });
  const torch::Tensor output = linear->forward(torch::ones({1, 2}));
  output.register_hook([&](const torch::Tensor& gradient) {
    devices.push_back(torch::cat({torch::zeros({1}), gradient.reshape({-1})}).device());
  });
  output.sum().backward();
  EXPECT_THAT(devices,
              ::testing::ElementsAre(SimulatedDevice(1), SimulatedDevice(1), SimulatedDevice(1)));
}

// An operator of the CPU may make tensors without a device, for a number among its arguments.
TEST_F(DefaultDeviceTest, IsNotThatOfWhatOperatorsMake) {
  torch::Tensor element = at::ones({1});
  element.mutable_grad() = at::ones({1});
  torch::optim::AdamW(std::vector<torch::Tensor>{element}, torch::optim::AdamWOptions(0.5)).step();
  EXPECT_LT(element.item<float>(), 1);
  EXPECT_EQ(element.mul(2).std().numel(), 1);
}

}  // namespace
}  // namespace ddp::testing
