// Schedulers over a sharded optimizer, and over the options of our own optimizers.
#include <tuple>
#include <vector>

#include <torch/types.h>

#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"
#include "train/optim/elementwise.h"
#include "train/schedulers/cycle_schedulers.h"

namespace ddp::train {
namespace {

using Tensors = std::vector<torch::Tensor>;
using Sharded = ZeroRedundancyOptimizer<NAdam>;

Tensors Parameters(at::Device device) {
  return {torch::linspace(-1, 1, 35, device).view({5, 7}), torch::linspace(0, 2, 3, device)};
}

void SetGradients(Tensors& parameters, int step) {
  for (torch::Tensor& parameter : parameters) {
    parameter.mutable_grad() = (parameter * (step + 1)).cos();
  }
}

// One cycle of the rate and of the first beta changes the sharded optimizer as the plain one, in
// each rank's part.
RANK_TEST(SchedulersTest, RatesAndBetasReachEachShard, 2) {
  const auto group = init_process_group();
  Tensors ours = Parameters(group->device());
  Tensors theirs = Parameters(group->device());
  Sharded sharded(ours, NAdamOptions(1), group);
  NAdam plain(theirs, NAdamOptions(1));
  const OneCycleLROptions options = {.max_lr = {0.1}, .total_steps = 10};
  OneCycleLR of_sharded(sharded, options);
  OneCycleLR of_plain(plain, options);
  for (int step = 0; step < 10; ++step) {
    SetGradients(ours, step);
    SetGradients(theirs, step);
    sharded.step();
    plain.step();
    of_sharded.step();
    of_plain.step();
  }
  EXPECT_EQ(of_sharded.get_last_lr(), of_plain.get_last_lr());
  const auto& local =
      static_cast<const NAdamOptions&>(sharded.local_optimizer().param_groups()[0].options());
  EXPECT_NE(local.lr(), 1);
  EXPECT_NE(std::get<0>(local.betas()), 0.9);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(torch::allclose(ours[i], theirs[i])) << i;
}

}  // namespace
}  // namespace ddp::train
