// Tests of the Reducer without a wrapper: on both kinds of GradientBuckets, and its events.
#include "ddp/reducer/reducer.h"

#include <torch/torch.h>

#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/grad_bucket.h"
#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/gradient_buckets.h"
#include "ddp/reducer/buckets/per_parameter_buckets.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/groups.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"
#include "testing/throw_in_backward.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Flatten;
using ::ddp::testing::Gradients;
using ::ddp::testing::ModelGroupOf;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::ThrowInBackward;
using ::testing::HasSubstr;

// Four layers; `side` is used where the caller says, `never` nowhere.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(3, 4));
    last = register_module("last", torch::nn::Linear(4, 2));
    side = register_module("side", torch::nn::Linear(4, 2));
    never = register_module("never", torch::nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x, bool use_side, bool explode) {
    torch::Tensor y = torch::tanh(first->forward(x));
    if (explode) y = ThrowInBackward(y, "not a number in the middle of the model");
    torch::Tensor z = last->forward(y);
    return use_side ? z + side->forward(y) : z;
  }
  torch::nn::Linear first{nullptr}, last{nullptr}, side{nullptr}, never{nullptr};
};
TORCH_MODULE(Net);

// Whether the ranks use `side`.
enum class Side { kAll, kSome, kNone };

// A model with a Reducer, and the part of the wrapper that a step needs.
class Trainer {
 public:
  Trainer(std::shared_ptr<ProcessGroup> group, Reducer::Options options, bool with_unused)
      : group_(std::move(group)) {
    for (const auto& item : net->named_parameters()) {
      if (!with_unused && item.key().find("never") == 0) {
        item.value().set_requires_grad(false);
      } else {
        parameters.push_back({.name = item.key(), .tensor = item.value()});
      }
    }
    options.initial_limits_bytes = {40};
    options.rebuild_limits_bytes = {72};
    reducer = std::make_unique<Reducer>(parameters, ModelGroupOf(group_), std::move(options));
  }

  // The forward and backward of one step. `step` chooses the inputs.
  void Run(int step, bool synchronize = true, Side side = Side::kAll, bool explode = false) {
    if (synchronize) reducer->CheckFinished();
    reducer->BeginForward();
    const bool use_side = side == Side::kAll || (side == Side::kSome && group_->rank() == 0);
    const torch::Tensor output =
        net->forward(torch::sin(torch::arange(12).view({4, 3}) * (1 + step) + group_->rank()),
                     use_side, explode);
    reducer->EndForward({output}, {.synchronize = synchronize});
    output.pow(2).mean().backward();
  }

  // Plain SGD.
  void Update(const at::Tensor& parameter) const {
    const torch::NoGradGuard no_grad;
    if (parameter.grad().defined()) parameter.sub_(0.1 * parameter.grad());
  }
  void Update() const {
    for (const Reducer::Parameter& parameter : parameters) Update(parameter.tensor);
  }

  Net net;
  std::vector<Reducer::Parameter> parameters;
  std::unique_ptr<Reducer> reducer;

 private:
  const std::shared_ptr<ProcessGroup> group_;
};

// Makes a Reducer for each of the kinds of buckets, and returns what `run` returns for each.
std::vector<torch::Tensor> OnEachKind(
    const std::function<torch::Tensor(GradientBuckets::Factory)>& run) {
  std::vector<torch::Tensor> results;
  for (const GradientBuckets::Factory& make :
       {FlatBuckets::MakerOf({}), FlatBuckets::MakerOf({.gradient_as_view = true}),
        GradientBuckets::Factory(PerParameterBuckets::Make)}) {
    results.push_back(run(make));
  }
  return results;
}

void ExpectSameBits(ProcessGroup& group, const std::vector<torch::Tensor>& results) {
  for (const torch::Tensor& result : results) {
    EXPECT_TRUE(torch::equal(result, results.front()));
    EXPECT_TRUE(SameOnAllRanks(group, result));
    EXPECT_GT(result.abs().sum().item<double>(), 0);
  }
}

// Two addends have one order, so that the bits do not depend on the buckets.
RANK_TEST(ReducerTest, KindsOfBucketsGiveTheSameBits, 2) {
  const auto group = init_process_group();
  for (const bool static_graph : {false, true}) {
    ExpectSameBits(*group, OnEachKind([&](GradientBuckets::Factory make) {
      Trainer trainer(group, {.static_graph = static_graph, .make_buckets = make}, false);
      std::vector<torch::Tensor> seen;
      for (int step = 0; step < 4; ++step) {
        trainer.net->zero_grad();
        // Gradients accumulate before they are averaged.
        if (step > 1) trainer.Run(step + 10, /*synchronize=*/false);
        trainer.Run(step);
        seen.push_back(Gradients(*trainer.net));
        trainer.Update();
      }
      EXPECT_TRUE(trainer.reducer->rebuilt());
      seen.push_back(Flatten(trainer.net->parameters()));
      return torch::cat(seen);
    }));
  }
}

RANK_TEST(ReducerTest, UnusedParametersOnEachKindOfBuckets, 2) {
  const auto group = init_process_group();
  for (const bool skip : {false, true}) {
    ExpectSameBits(*group, OnEachKind([&](GradientBuckets::Factory make) {
      Trainer trainer(
          group,
          {.find_unused_parameters = true, .skip_unused_buckets = skip, .make_buckets = make},
          true);
      std::vector<torch::Tensor> seen;
      for (const Side side : {Side::kNone, Side::kSome, Side::kAll, Side::kNone}) {
        trainer.net->zero_grad();
        trainer.Run(static_cast<int>(seen.size()), true, side);
        EXPECT_EQ(trainer.net->side->weight.grad().defined(), side != Side::kNone);
        EXPECT_FALSE(trainer.net->never->weight.grad().defined());
        seen.push_back(Gradients(*trainer.net));
      }
      return torch::cat(seen);
    }));
  }
}

// The last bucket carries the map, except where its kind or a hook does not allow it.
RANK_TEST(ReducerTest, TheMapOfUsedParametersHasACollectiveOnlyWhereItMust, 2) {
  const auto group = init_process_group();
  const auto launched = [&] { return ModelGroupOf(group)->communicator().log()->launched(); };
  const auto of_a_pass = [&](Reducer::Options options, bool with_hook) {
    options.find_unused_parameters = true;
    Trainer trainer(group, std::move(options), true);
    if (with_hook) {
      trainer.reducer->RegisterHook(
          "sum", {.first = [&](GradBucket& bucket) {
            return Communicator::FutureOf(ModelGroupOf(group)->communicator().AllReduce(
                bucket.buffer(), {"a hook's all-reduce"}));
          }});
    }
    trainer.Run(0);
    const int64_t before = launched();
    trainer.Run(1, true, Side::kNone);
    EXPECT_EQ(trainer.reducer->untouched().size(), 4U);
    return launched() - before - static_cast<int64_t>(trainer.reducer->plan().buckets().size());
  };
  EXPECT_EQ(of_a_pass({}, false), 0);
  EXPECT_EQ(of_a_pass({.make_buckets = FlatBuckets::MakerOf({.lazy = true})}, false), 0);
  EXPECT_EQ(of_a_pass({}, true), 1);
  EXPECT_EQ(of_a_pass({.skip_unused_buckets = true}, true),
            -1);  // the map; two buckets are not sent
}

RANK_TEST(ReducerTest, AFailureOnEachKindOfBuckets, .world_size = 2,
          .not_on_device = "the wrapper decides there what follows a failure") {
  const auto group = init_process_group();
  ExpectSameBits(*group, OnEachKind([&](GradientBuckets::Factory make) {
    Trainer trainer(group, {.make_buckets = make}, false);
    trainer.Run(0);
    const bool culprit = group->rank() == 1;
    const std::string error = ErrorOf<std::exception>(
        [&] { trainer.Run(1, /*synchronize=*/true, Side::kAll, /*explode=*/culprit); });
    EXPECT_THAT(error, HasSubstr(culprit ? "not a number" : "rank 1"));
    group->ensure_usable();
    trainer.reducer->ResetAfterFailure(ModelGroupOf(group));
    trainer.net->zero_grad();
    trainer.Run(2);
    return Gradients(*trainer.net);
  }));
}

RANK_TEST(ReducerTest, ASkippedBucketAndAJoinedRankLeaveGradientsAsTheyAre, 2) {
  const auto group = init_process_group();
  Trainer trainer(group, {.find_unused_parameters = true, .skip_unused_buckets = true}, true);
  const int buckets = static_cast<int>(trainer.reducer->plan().buckets().size());
  trainer.Run(0);
  EXPECT_GT(trainer.reducer->buckets_reduced(), 0);
  EXPECT_LT(trainer.reducer->buckets_reduced(), buckets);
  EXPECT_FALSE(trainer.net->never->weight.grad().defined());
  // Rank 1 has no more inputs, and learns the parts of the pass.
  const torch::Tensor gradients = Gradients(*trainer.net);
  if (group->rank() == 0) {
    trainer.Run(1);
    EXPECT_LT(trainer.reducer->buckets_reduced(), buckets);
  } else {
    trainer.reducer->Shadow({.used_map_before = true}, {.divisor = 2, .source = 0});
    EXPECT_TRUE(torch::equal(Gradients(*trainer.net), gradients));
  }
}

}  // namespace
}  // namespace ddp::internal
