// How often the host waits for the device in a steady training step: never, where PyTorch never
// waits. The simulated device throws, with the stack, at the first wait beyond the budget.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/time/time.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_group.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using Options = DistributedDataParallelOptions;

// Batch norms have the buffers of a ResNet's.
struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor h = torch::relu(norm2(conv2(torch::relu(norm1(conv1(x))))));
    return last(h.mean({2, 3}));
  }
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(3, 8, 3));
  torch::nn::BatchNorm2d norm1 = register_module("norm1", torch::nn::BatchNorm2d(8));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(8, 8, 3));
  torch::nn::BatchNorm2d norm2 = register_module("norm2", torch::nn::BatchNorm2d(8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 2));
};
TORCH_MODULE(Net);

struct Variant {
  Options options = {};
  bool sync_batch_norm = false;
  bool zero = false;
  int64_t budget = 0;
};

void ExpectBudget(const Variant& variant) {
  testing::Runtime& runtime = testing::InstallAccelerator(
      {.seed = 1, .lateness = absl::Milliseconds(1), .sync_budget = variant.budget});
  const auto group = init_process_group({.make_backend = testing::ConnectSimulatedDevices});
  torch::manual_seed(1);
  Net net;
  if (variant.sync_batch_norm) convert_sync_batchnorm(*net);
  net->to(group->device());
  DistributedDataParallel<Net> model(net, group, variant.options);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (variant.zero) {
    optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::Adam>>(
        model, torch::optim::AdamOptions(0.01));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
  }
  const torch::Tensor input = torch::ones({4, 3, 8, 8}).to(group->device());
  for (int step = 0; step < 8; ++step) {
    if (step >= 3) runtime.BeginStep();  // the first passes find plans and rebuild buckets
    optimizer->zero_grad();
    model(input).sum().backward();
    optimizer->step();
  }
  EXPECT_LE(runtime.step_syncs(), variant.budget);
}

RANK_TEST(DeviceBudgetTest, Default, 2) { ExpectBudget({}); }
RANK_TEST(DeviceBudgetTest, StaticGraph, 2) { ExpectBudget({.options = {.static_graph = true}}); }
RANK_TEST(DeviceBudgetTest, GradientsAsViews, 2) {
  ExpectBudget({.options = {.gradient_as_bucket_view = true}});
}
// PyTorch, too, waits for the map of used parameters.
RANK_TEST(DeviceBudgetTest, FindUnusedParameters, 2) {
  ExpectBudget({.options = {.find_unused_parameters = true}, .budget = 1});
}
RANK_TEST(DeviceBudgetTest, SyncBatchNorm, 2) { ExpectBudget({.sync_batch_norm = true}); }
RANK_TEST(DeviceBudgetTest, ZeroRedundancyOptimizer, 2) { ExpectBudget({.zero = true}); }

}  // namespace
}  // namespace ddp
