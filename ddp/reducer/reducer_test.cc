// Tests of the Reducer without a wrapper: on both kinds of GradientBuckets, and its events.
#include "ddp/reducer/reducer.h"

#include <torch/torch.h>

#include <map>
#include <numeric>

#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/grad_bucket.h"
#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/buckets/bucket_tuning.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/gradient_buckets.h"
#include "ddp/reducer/buckets/gradient_context.h"
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
using ::ddp::testing::ErrorOfPeer;
using ::ddp::testing::Flatten;
using ::ddp::testing::Gradients;
using ::ddp::testing::ReducerGroupOf;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::ThrowInBackward;
using ::testing::HasSubstr;

using Outcome = Reducer::BucketOutcome;

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
    reducer = std::make_unique<Reducer>(parameters, ReducerGroupOf(group_), std::move(options));
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
  const auto launched = [&] { return ReducerGroupOf(group)->communicator().log()->launched(); };
  const auto of_a_pass = [&](Reducer::Options options, bool with_hook) {
    options.find_unused_parameters = true;
    Trainer trainer(group, std::move(options), true);
    if (with_hook) {
      trainer.reducer->RegisterHook(
          "sum", {.first = [&](GradBucket& bucket) {
            return Communicator::FutureOf(ReducerGroupOf(group)->communicator().AllReduce(
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

// With two addends, the bits are those of any other buckets.
RANK_TEST(ReducerTest, BucketSizesArePickedInTheSecondPassAlikeOnAllRanks, 2) {
  const auto group = init_process_group();
  for (const bool static_graph : {false, true}) {
    Trainer picks(group, {.tune_buckets = true, .static_graph = static_graph}, false);
    Trainer stays(group, {.static_graph = static_graph}, false);
    std::vector<BucketPlan> plans;
    for (int step = 0; step < 4; ++step) {
      for (Trainer* const trainer : {&picks, &stays}) {
        trainer->net->zero_grad();
        trainer->Run(step);
      }
      EXPECT_TRUE(torch::equal(Gradients(*picks.net), Gradients(*stays.net)));
      EXPECT_EQ(picks.reducer->choice().has_value(), step >= 1);
      plans.push_back(picks.reducer->plan());
    }
    EXPECT_FALSE(stays.reducer->choice().has_value());
    EXPECT_EQ(plans[3], plans[1]);
    const BucketChoice& choice = *picks.reducer->choice();
    // All gradients are far below 1 MiB, so every candidate with a large cap has one bucket.
    EXPECT_EQ(plans[1].buckets().size(), 1U);
    EXPECT_GT(choice.cost.fixed_ns, 0);
    EXPECT_GT(choice.default_end_ns, 0);
    EXPECT_TRUE(SameOnAllRanks(*group, torch::tensor(choice.Encode(), torch::kLong)));
    EXPECT_TRUE(SameOnAllRanks(*group, torch::tensor(plans[1].Encode(), torch::kInt)));
    picks.reducer->RequestRebuild();
    picks.net->zero_grad();
    picks.Run(9);
    EXPECT_TRUE(picks.reducer->choice().has_value());
  }
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
    trainer.reducer->ResetAfterFailure(ReducerGroupOf(group));
    trainer.net->zero_grad();
    trainer.Run(2);
    return Gradients(*trainer.net);
  }));
}

// ---- The completion of buckets.

RANK_TEST(ReducerTest, AStepPerBucketEqualsAStepAfterTheBackward, 2) {
  const auto group = init_process_group();
  ExpectSameBits(*group, OnEachKind([&](GradientBuckets::Factory make) {
    Trainer after(group, {.make_buckets = make}, false);
    Trainer within(group, {.make_buckets = make}, false);
    std::vector<int> order;
    within.reducer->set_on_bucket_complete([&](int bucket, Outcome outcome) {
      EXPECT_EQ(outcome, Outcome::kReduced);
      order.push_back(bucket);
      for (const int index : within.reducer->plan().buckets()[bucket].parameters) {
        within.Update(within.parameters[index].tensor);
      }
    });
    for (int step = 0; step < 4; ++step) {
      after.net->zero_grad();
      after.Run(step);
      after.Update();
      within.net->zero_grad();
      order.clear();
      const size_t buckets = within.reducer->plan().buckets().size();
      within.Run(step);
      EXPECT_GT(buckets, 1u);
      std::vector<int> plan_order(buckets);
      std::iota(plan_order.begin(), plan_order.end(), 0);
      EXPECT_EQ(order, plan_order);
    }
    const torch::Tensor weights = Flatten(within.net->parameters());
    EXPECT_TRUE(torch::equal(weights, Flatten(after.net->parameters())));
    return weights;
  }));
}

// A distributed autograd context that has nothing.
class EmptyContext final : public GradientContext {
 public:
  void AtEnd(std::function<void()> function) override { at_end_.push_back(std::move(function)); }
  at::Tensor Gradient(const at::Tensor& leaf) override { return leaf.grad(); }
  void SetGradient(const at::Tensor&, at::Tensor) override {}
  int task() const override { return 1000; }
  const std::vector<const torch::autograd::Node*>& nodes() const override { return nodes_; }
  bool Reaches(const torch::autograd::Node*) const override { return true; }

 private:
  std::vector<std::function<void()>> at_end_;
  std::vector<const torch::autograd::Node*> nodes_;
};

RANK_TEST(ReducerTest, AStepPerBucketIsRefusedInAContext, .world_size = 1,
          .not_on_device = "distributed autograd has tensors of the CPU only") {
  Trainer trainer(init_process_group(), {}, false);
  trainer.reducer->set_on_bucket_complete([](int, Outcome) {});
  EmptyContext context;
  const GradientContext::Running running(&context);
  std::string error = "none";
  try {
    trainer.Run(0);
  } catch (const ConfigurationError& refused) {
    error = refused.what();
  }
  EXPECT_NE(error.find("an optimizer that steps in the backward is not supported"),
            std::string::npos)
      << error;
}

RANK_TEST(ReducerTest, ASkippedBucketAndAJoinedRankHaveTheirOutcomes, 2) {
  const auto group = init_process_group();
  Trainer trainer(group, {.find_unused_parameters = true, .skip_unused_buckets = true}, true);
  std::map<Outcome, int> outcomes;
  trainer.reducer->set_on_bucket_complete([&](int, Outcome outcome) { ++outcomes[outcome]; });
  const int buckets = static_cast<int>(trainer.reducer->plan().buckets().size());
  trainer.Run(0);
  const int skipped = outcomes[Outcome::kSkipped];
  EXPECT_GT(skipped, 0);
  EXPECT_EQ(outcomes[Outcome::kReduced], buckets - skipped);
  EXPECT_EQ(outcomes[Outcome::kReduced], trainer.reducer->buckets_reduced());
  // Rank 1 has no more inputs, and learns the parts of the pass.
  const torch::Tensor gradients = Gradients(*trainer.net);
  outcomes.clear();
  if (group->rank() == 0) {
    trainer.Run(1);
    EXPECT_EQ(outcomes[Outcome::kSkipped], skipped);
  } else {
    trainer.reducer->Shadow({.used_map_before = true}, {.divisor = 2, .source = 0});
    EXPECT_EQ(outcomes[Outcome::kShadowed], buckets);
    EXPECT_TRUE(torch::equal(Gradients(*trainer.net), gradients));
  }
}

RANK_TEST(ReducerTest, AnExceptionAtTheCompletionOfABucketReachesAllRanks, 2) {
  const auto group = init_process_group();
  Trainer trainer(group, {}, false);
  const bool culprit = group->rank() == 1;
  trainer.reducer->set_on_bucket_complete([&](int bucket, Outcome) {
    if (culprit && bucket == 1) throw std::runtime_error("the optimizer has no state");
  });
  // The other rank may have all sums when the exception comes; the new buckets need both ranks.
  EXPECT_THAT(ErrorOfPeer<std::exception>(*group, [&] { trainer.Run(0); }),
              HasSubstr("rank 1: the end of the backward: the optimizer has no state"));
}

}  // namespace
}  // namespace ddp::internal
