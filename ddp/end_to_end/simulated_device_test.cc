// Trains each variant of DistributedDataParallel on the simulated device: after some steps every
// parameter has the bits that it has on the CPU, however late the device's kernels and collectives
// run. DDP_TEST_SEEDS is the number of seeds for a variant.
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_group.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::SimulatedDevice;
using Options = DistributedDataParallelOptions;
using Group = std::shared_ptr<ProcessGroup>;

// Has a parameter that some steps do not use, and buffers.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(10, 6));
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    detour = register_module("detour", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(8, 3));
  }
  torch::Tensor forward(const torch::Tensor& tokens, bool takes_detour) {
    torch::Tensor x = torch::relu(norm(first(embedding(tokens))));
    return last(takes_detour ? torch::tanh(detour(x)) : x);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear first{nullptr}, detour{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

struct Variant {
  Options options = {};
  bool bf16_hook = false;
  bool sync_batch_norm = false;
  bool zero = false;
  bool accumulates = false;       // every other step under no_sync()
  bool joins = false;             // rank 1 has fewer batches
  bool on_a_side_stream = false;  // the forward
};

constexpr int kSteps = 6;

// One training run of a variant.
class Run {
 public:
  Run(const Group& group, const Variant& variant) : group_(group), variant_(variant) {
    torch::manual_seed(3);
    net_ = Net();
    if (variant.sync_batch_norm) convert_sync_batchnorm(*net_);
    net_->to(group->device());
    model_.emplace(net_, group, variant.options);
    if (variant.bf16_hook) model_->register_comm_hook(group, bf16_compress_hook);
    if (variant.zero) {
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<torch::optim::Adam>>(
          *model_, torch::optim::AdamOptions(0.01));
    } else {
      optimizer_ = std::make_unique<torch::optim::SGD>(net_->parameters(),
                                                       torch::optim::SGDOptions(0.1).momentum(0.9));
    }
  }

  // Returns all parameters and buffers, on the CPU.
  torch::Tensor Train() {
    if (variant_.joins) {
      ddp::Join join({&*model_});
      for (int step = 0; step < kSteps - 2 * group_->rank(); ++step) Step(step);
      join.finish();
    } else {
      for (int step = 0; step < kSteps; ++step) Step(step);
    }
    std::vector<torch::Tensor> all;
    for (const auto& tensor : net_->parameters()) all.push_back(tensor.detach().cpu().flatten());
    for (const auto& tensor : net_->buffers()) all.push_back(tensor.cpu().flatten().to(at::kFloat));
    return torch::cat(all);
  }

 private:
  void Step(int step) {
    const auto on_cpu = torch::TensorOptions().device(at::kCPU);
    const torch::Tensor tokens =
        (torch::arange(5, on_cpu) * (step + 2) + group_->rank()).remainder(10).to(group_->device());
    const bool accumulates = variant_.accumulates && step % 2 == 0;
    const auto guard = model_->no_sync(accumulates);
    Forward(tokens, step).pow(2).mean().backward();
    if (accumulates) return;
    optimizer_->step();
    optimizer_->zero_grad();
  }

  torch::Tensor Forward(const torch::Tensor& tokens, int step) {
    const bool detour =
        !variant_.options.find_unused_parameters || (step + group_->rank()) % 3 == 0;
    if (!variant_.on_a_side_stream || group_->device().is_cpu()) {
      return model_->forward(tokens, detour);
    }
    const c10::impl::VirtualGuardImpl device(group_->device().type());
    const c10::Stream main = device.getStream(group_->device());
    const c10::Stream side = device.getStreamFromGlobalPool(group_->device());
    OrderAfter(main, side);
    torch::Tensor output;
    {
      const c10::StreamGuard on_side(side);
      output = model_->forward(tokens, detour);
    }
    OrderAfter(side, main);
    return output;
  }

  static void OrderAfter(c10::Stream before, c10::Stream after) {
    c10::Event event(before.device_type());
    event.record(before);
    event.block(after);
  }

  const Group group_;
  const Variant variant_;
  Net net_{nullptr};
  std::optional<DistributedDataParallel<Net>> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

int Seeds() {
  int seeds = 10;
  const char* text = std::getenv("DDP_TEST_SEEDS");
  if (text != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &seeds)) << text;
  }
  return seeds;
}

Group MakeGroup(const std::string& name, const Group& first, const ProcessGroupOptions& options) {
  return std::make_shared<ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>(name, first->store()),
      ProcessGroup::Place{.rank = first->rank(),
                          .size = first->size(),
                          .local_rank = first->rank(),
                          .local_size = first->size()},
      options);
}

void HasTheCpusBits(const Variant& variant) {
  testing::InstallAccelerator({});  // before the first backward
  const Group cpu = init_process_group({.backend = "gloo"});
  const torch::Tensor expected = Run(cpu, variant).Train();
  for (int seed = 0; seed < Seeds(); ++seed) {
    testing::InstallAccelerator(
        {.seed = static_cast<uint64_t>(seed), .lateness = absl::Milliseconds(seed == 0 ? 0 : 2)});
    const Group group = MakeGroup(absl::StrCat("seed", seed), cpu,
                                  {.make_backend = testing::ConnectSimulatedDevices});
    ASSERT_EQ(group->device(), SimulatedDevice(group->rank()));
    const torch::Tensor trained = Run(group, variant).Train();
    EXPECT_TRUE(torch::equal(trained, expected))
        << "seed " << seed << ": differs by " << (trained - expected).abs().max().item<float>();
  }
}

RANK_TEST(SimulatedDeviceTest, Plain, 2) { HasTheCpusBits({}); }
RANK_TEST(SimulatedDeviceTest, GradientAsBucketView, 2) {
  HasTheCpusBits({.options = {.gradient_as_bucket_view = true}});
}
RANK_TEST(SimulatedDeviceTest, FindUnusedParameters, 2) {
  HasTheCpusBits({.options = {.find_unused_parameters = true}});
}
RANK_TEST(SimulatedDeviceTest, Bf16CommHook, 2) { HasTheCpusBits({.bf16_hook = true}); }
RANK_TEST(SimulatedDeviceTest, StaticGraph, 2) {
  HasTheCpusBits({.options = {.static_graph = true}});
}
RANK_TEST(SimulatedDeviceTest, LazyBucketAllocation, 2) {
  HasTheCpusBits({.options = {.lazy_bucket_allocation = true}});
}
RANK_TEST(SimulatedDeviceTest, SyncBatchNorm, 2) { HasTheCpusBits({.sync_batch_norm = true}); }
RANK_TEST(SimulatedDeviceTest, MixedPrecision, 2) {
  const MixedPrecision precision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};
  HasTheCpusBits({.options = {.mixed_precision = precision}});
}
RANK_TEST(SimulatedDeviceTest, ZeroRedundancyOptimizer, 2) { HasTheCpusBits({.zero = true}); }
RANK_TEST(SimulatedDeviceTest, NoSync, 2) { HasTheCpusBits({.accumulates = true}); }
RANK_TEST(SimulatedDeviceTest, Join, 2) { HasTheCpusBits({.joins = true}); }
RANK_TEST(SimulatedDeviceTest, SideStream, 2) { HasTheCpusBits({.on_a_side_stream = true}); }

}  // namespace
}  // namespace ddp
