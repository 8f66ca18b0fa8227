// Tests the simulated device with LibTorch on it: training has the CPU's bits, however late kernels
// run, and a program that forgets an order between streams has others.
#include "testing/accelerator/accelerator.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

Tensor Bits(const Tensor& tensor) { return tensor.detach().cpu(); }

// Convolution, batch norm, embedding, dropout and linear: each kind of kernel has a layer.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(16, 12));
    convolution = register_module("convolution",
                                  torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 4, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    linear = register_module("linear", torch::nn::Linear(16, 2));
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens).view({tokens.size(0), 3, 4});
    x = torch::relu(norm(convolution(x))).flatten(1);
    return linear(torch::dropout(x, 0.3, is_training()));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Net);

// Returns all parameters and buffers after some steps.
template <typename Optimizer, typename Options>
Tensor Train(c10::Device device, const Options& options) {
  torch::manual_seed(1);
  Net net;
  net->to(device);
  Optimizer optimizer(net->parameters(), options);
  torch::manual_seed(2);
  for (int step = 0; step < 20; ++step) {
    const Tensor tokens = (torch::arange(8) * (step + 3) % 16).to(device);
    const Tensor target = torch::full({8, 2}, 0.1 * step, device);
    optimizer.zero_grad();
    torch::mse_loss(net(tokens), target).backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
  }
  std::vector<Tensor> all;
  for (const Tensor& tensor : net->parameters()) all.push_back(Bits(tensor).flatten());
  for (const Tensor& tensor : net->buffers()) all.push_back(Bits(tensor).flatten().to(at::kFloat));
  return torch::cat(all);
}

Tensor TrainWithSgd(c10::Device device) {
  return Train<torch::optim::SGD>(device, torch::optim::SGDOptions(0.1).momentum(0.9));
}
Tensor TrainWithAdam(c10::Device device) {
  return Train<torch::optim::Adam>(device, torch::optim::AdamOptions(0.01));
}

class AcceleratorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);  // each stream has a thread already
    InstallAccelerator({});
  }
};

// Replaces the devices by ones whose kernels are up to `late_ms` late.
void Install(int seed, int late_ms) {
  InstallAccelerator(
      {.seed = static_cast<uint64_t>(seed), .lateness = absl::Milliseconds(late_ms)});
}

TEST_F(AcceleratorTest, TrainingHasTheCpusBits) {
  const Tensor sgd = TrainWithSgd(at::kCPU);
  const Tensor adam = TrainWithAdam(at::kCPU);
  for (int seed = 0; seed < 11; ++seed) {
    Install(seed, /*late_ms=*/seed == 0 ? 0 : 2);
    EXPECT_TRUE(torch::equal(TrainWithSgd(SimulatedDevice()), sgd)) << "seed " << seed;
    EXPECT_TRUE(torch::equal(TrainWithAdam(SimulatedDevice(1)), adam)) << "seed " << seed;
  }
}

TEST_F(AcceleratorTest, IsLibTorchsAccelerator) {
  EXPECT_EQ(at::getAccelerator(), at::kPrivateUse1);
  EXPECT_EQ(at::accelerator::deviceCount(), 2);
  const Tensor tensor = torch::ones({3}, SimulatedDevice(1));
  EXPECT_EQ(tensor.device(), SimulatedDevice(1));
  EXPECT_EQ(at::accelerator::getDeviceIndex(), 0) << "a factory leaves the current device";
  EXPECT_TRUE(torch::equal(tensor.to(SimulatedDevice(0)).cpu(), torch::ones({3})));
  EXPECT_TRUE(torch::ones({3}).pin_memory().is_pinned());
}

TEST_F(AcceleratorTest, TheHostCannotReadATensor) {
  const Tensor tensor = torch::ones({3}, SimulatedDevice());
  EXPECT_DEATH(
      {
        volatile float x = *tensor.data_ptr<float>();
        (void)x;
      },
      "");
}

TEST_F(AcceleratorTest, DrawsTheCpusNumbers) {
  const auto draw = [](c10::Device device) {
    torch::manual_seed(7);
    const auto options = torch::TensorOptions().device(device);
    const Tensor probabilities = torch::full({5}, 0.4, options);
    return torch::cat({torch::randn({5}, options), torch::rand({5}, options),
                       torch::randperm(5, options).to(at::kFloat), torch::bernoulli(probabilities),
                       torch::multinomial(probabilities, 3).to(at::kFloat),
                       at::normal(0.0, probabilities)})
        .cpu();
  };
  EXPECT_TRUE(torch::equal(draw(SimulatedDevice()), draw(at::kCPU)));
  // The state can be kept and put back.
  at::Generator generator = at::globalContext().defaultGenerator(SimulatedDevice());
  const Tensor state = generator.get_state();
  const Tensor first = torch::randn({4}, SimulatedDevice());
  generator.set_state(state);
  EXPECT_TRUE(torch::equal(torch::randn({4}, SimulatedDevice()), first));
}

TEST_F(AcceleratorTest, AnOperatorWhoseShapeIsInTheDataSynchronizes) {
  const Tensor tensor = torch::tensor({0, 3, 0, 4}).to(SimulatedDevice());
  EXPECT_TRUE(
      torch::equal(tensor.nonzero().cpu(), torch::tensor({1, 3}).view({2, 1}).to(at::kLong)));
  EXPECT_TRUE(torch::equal(tensor.masked_select(tensor > 0).cpu(), torch::tensor({3, 4})));
  EXPECT_EQ(tensor.index({tensor > 3}).cpu().item<int>(), 4);
  EXPECT_EQ(tensor.sum().item<int>(), 7);
}

TEST_F(AcceleratorTest, TensorsGrowAndMoveAsOnOtherDevices) {
  Tensor tensor = torch::ones({2}, SimulatedDevice());
  tensor.resize_({3}).select(0, 2).fill_(5);
  EXPECT_TRUE(torch::equal(tensor.cpu(), torch::tensor({1.0f, 1.0f, 5.0f})));
  Tensor view = torch::empty({0}, SimulatedDevice());
  view.set_(tensor.storage(), 1, {2}, {1});
  EXPECT_TRUE(torch::equal(view.cpu(), torch::tensor({1.0f, 5.0f})));
  EXPECT_TRUE(torch::equal((view.to(SimulatedDevice(1)) + 1).to(SimulatedDevice()) + view,
                           torch::tensor({3.0f, 11.0f}).to(SimulatedDevice())));
  EXPECT_ANY_THROW(view + torch::ones({2})) << "a tensor of the host's";
  EXPECT_ANY_THROW(view + torch::ones({2}, SimulatedDevice(1)));
}

TEST_F(AcceleratorTest, CountsEachWaitOfTheHost) {
  Runtime& runtime = Accelerator();
  const Tensor tensor = torch::ones({4}, SimulatedDevice());
  const Tensor pinned = torch::ones({4}).pin_memory();
  const auto syncs_of = [&](const std::function<void()>& body) {
    runtime.BeginStep();
    body();
    return runtime.step_syncs();
  };
  EXPECT_EQ(syncs_of([&] { tensor.add(1).matmul(tensor).sum(); }), 0);
  EXPECT_EQ(syncs_of([&] { pinned.to(SimulatedDevice(), /*non_blocking=*/true); }), 0);
  EXPECT_EQ(syncs_of([&] { torch::ones({4}).to(SimulatedDevice(), /*non_blocking=*/true); }), 1);
  EXPECT_EQ(syncs_of([&] { pinned.to(SimulatedDevice()); }), 1);
  EXPECT_EQ(syncs_of([&] { tensor.cpu(); }), 1);
  EXPECT_EQ(syncs_of([&] { tensor[0].item<float>(); }), 1);
  EXPECT_EQ(syncs_of([&] { tensor.nonzero(); }), 1);
  EXPECT_EQ(syncs_of([&] { torch::equal(tensor, tensor); }), 1);
  EXPECT_EQ(syncs_of([&] { at::accelerator::synchronizeDevice(0); }), 1);
}

// Returns the text of the error that `body` throws.
std::string ErrorIn(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

TEST_F(AcceleratorTest, AKernelsErrorIsThrownLaterAndStays) {
  const Tensor indices = torch::tensor({9}).to(SimulatedDevice());
  const Tensor table = torch::ones({3, 2}, SimulatedDevice());
  EXPECT_EQ(ErrorIn([&] { table.index_select(0, indices); }), "none") << "launched only";
  EXPECT_THAT(ErrorIn([&] { table.cpu(); }), HasSubstr("aten::index_select"));
  EXPECT_THAT(ErrorIn([&] { torch::ones({2}, SimulatedDevice()); }), HasSubstr("index_select"));
}

TEST_F(AcceleratorTest, ALaunchMayBlockAndAKernelMayFail) {
  InstallAccelerator({.launch_blocking = true, .fail_kernel = 3});
  const Tensor tensor = torch::ones({2}, SimulatedDevice());  // a kernel
  tensor.add(1);
  EXPECT_THAT(ErrorIn([&] { tensor.mul(2); }), HasSubstr("aten::mul"));
}

// Gives the current stream kernels, some of which are late.
void KeepBusy() {
  for (int i = 0; i < 20; ++i) LaunchOn(SimulatedDevice(), "busy", [] {});
}

// In each hazard, the host or another stream uses memory with no order before or after a kernel's
// use. `ordered` gives the order. Returns for how many seeds the result is wrong.
int WrongResults(const std::function<bool(bool ordered)>& is_right, bool ordered) {
  int wrong = 0;
  for (int seed = 0; seed < 50; ++seed) {
    Install(seed, 2);
    if (!is_right(ordered)) ++wrong;
    at::accelerator::synchronizeDevice(0);
  }
  return wrong;
}

bool AnotherStreamReads(bool ordered) {
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const c10::Stream main = guard.getStream(SimulatedDevice());
  const c10::Stream side = guard.getStreamFromGlobalPool(SimulatedDevice());
  KeepBusy();
  const Tensor tensor = torch::full({4}, 1.0, SimulatedDevice());
  Tensor doubled;
  if (ordered) {
    c10::Event written(at::kPrivateUse1);
    written.record(main);
    written.block(side);
  }
  {
    const c10::StreamGuard on_side(side);
    doubled = (tensor * 2).cpu();
  }
  return torch::equal(doubled, torch::full({4}, 2.0));
}

bool MemoryIsReusedBeforeASideStreamHasReadIt(bool ordered) {
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const c10::Stream side = guard.getStreamFromGlobalPool(SimulatedDevice());
  Tensor tensor = torch::full({64}, 1.0, SimulatedDevice());
  guard.synchronizeDevice(0);
  Tensor doubled;
  {
    const c10::StreamGuard on_side(side);
    KeepBusy();
    doubled = tensor * 2;
  }
  if (ordered) tensor.record_stream(side);
  tensor = Tensor();
  const Tensor next = torch::full({64}, 5.0, SimulatedDevice());
  guard.synchronizeDevice(0);
  return torch::equal(doubled.cpu(), torch::full({64}, 2.0));
}

bool PinnedMemoryIsOverwritten(bool ordered) {
  Tensor host = torch::full({4}, 1.0).pin_memory();
  KeepBusy();
  const Tensor tensor = host.to(SimulatedDevice(), /*non_blocking=*/true);
  if (ordered) at::accelerator::synchronizeDevice(0);
  host.fill_(7);
  return torch::equal(tensor.cpu(), torch::full({4}, 1.0));
}

bool TheHostReadsBeforeTheCopyIsDone(bool ordered) {
  const Tensor tensor = torch::full({4}, 1.0, SimulatedDevice());
  const Tensor host = torch::zeros({4}).pin_memory();
  KeepBusy();
  host.copy_(tensor, /*non_blocking=*/true);
  if (ordered) at::accelerator::synchronizeDevice(0);
  const bool right = torch::equal(host, torch::full({4}, 1.0));
  at::accelerator::synchronizeDevice(0);
  return right;
}

TEST_F(AcceleratorTest, FindsEachHazardInEverySeed) {
  const std::map<std::string, std::function<bool(bool)>> hazards = {
      {"no wait", AnotherStreamReads},
      {"no record_stream", MemoryIsReusedBeforeASideStreamHasReadIt},
      {"early reuse", PinnedMemoryIsOverwritten},
      {"unsynchronized copy", TheHostReadsBeforeTheCopyIsDone},
  };
  for (const auto& [name, is_right] : hazards) {
    EXPECT_EQ(WrongResults(is_right, /*ordered=*/false), 50) << name;
    EXPECT_EQ(WrongResults(is_right, /*ordered=*/true), 0) << name;
  }
}

}  // namespace
}  // namespace ddp::testing
