// Tests DistributedDataParallel under a Join, with ranks that run out of inputs at different times.
// In every step, every active rank's gradient is compared with a computation of one process. The
// ranks are threads on a fake backend; in one case they are processes, on Gloo.
#include <torch/torch.h>

#include <algorithm>
#include <map>

#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Flatten;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::SameOnAllRanks;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int width = 4) {
    first = register_module("first", torch::nn::Linear(3, width));
    last = register_module("last", torch::nn::Linear(width, 2));
    unused = register_module("unused", torch::nn::Linear(width, 2));
    seen = register_buffer("seen", torch::zeros({1}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (is_training()) seen.add_(1);
    return last->forward(torch::tanh(first->forward(x)));
  }
  torch::nn::Linear first{nullptr}, last{nullptr}, unused{nullptr};
  torch::Tensor seen;
};
TORCH_MODULE(Net);

torch::Tensor Input(int rank, int step) { return RandomNumbers(100 * step + rank, {4, 3}); }

// Returns the sum over the ranks with inputs, divided.
std::map<std::string, torch::Tensor> Expected(const Net& net, const std::vector<int>& inputs,
                                              const std::vector<int>& steps, bool by_size) {
  Net copy(static_cast<int>(net->first->weight.size(0)));
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      copy->parameters()[i].copy_(net->parameters()[i]);
    }
  }
  int active = 0;
  for (const int count : inputs) active += steps.back() < count ? 1 : 0;
  const int divisor = by_size ? static_cast<int>(inputs.size()) : active;
  for (const int step : steps) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      if (steps.back() >= inputs[rank]) continue;
      (copy->forward(Input(static_cast<int>(rank), step)).pow(2).mean() / divisor).backward();
    }
  }
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& item : copy->named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

// In sums of thousands of numbers that cancel, the largest one bounds the rounding.
bool IsClose(const torch::Tensor& gradient, const torch::Tensor& wanted) {
  const double largest = std::max(1.0, wanted.abs().max().item<double>());
  return torch::allclose(gradient, wanted, 1e-4, 1e-6 * largest);
}

struct Variant {
  DistributedDataParallelOptions options;
  bool freeze_unused = true;
  bool hook = false;
  bool buffer_hook = false;
  bool accumulate = false;
  bool by_size = true;
  bool delayed = false;
  int width = 4;  // from 2,048 on, the weights are reduced where they lie
};

void TrainUnevenly(const std::shared_ptr<ProcessGroup>& group, const Variant& variant,
                   const std::vector<int>& inputs) {
  Net net(variant.width);
  Randomize(*net, 1);
  if (variant.freeze_unused) {
    net->unused->weight.set_requires_grad(false);
    net->unused->bias.set_requires_grad(false);
  }
  DistributedDataParallelOptions options = variant.options;
  if (variant.delayed) {
    options.delay_all_reduce_named_params = {{"last.weight", net->last->weight}};
    options.param_to_hook_all_reduce = net->first->weight;
  }
  DistributedDataParallel model(net, group, options);
  if (variant.hook) model.register_comm_hook(group, allreduce_hook);
  int buffers_seen = 0;
  if (variant.buffer_hook) {
    model.register_buffer_comm_hook(
        group,
        [&](const std::shared_ptr<ProcessGroup>& state,
            const std::map<std::string, torch::Tensor>& buffers) {
          ++buffers_seen;
          return std::vector<TensorFuture>{state->all_reduce_async(buffers.at("seen"))};
        },
        BufferCommHookLocation::kPostForward);
  }
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const int mine = inputs[group->rank()];
  Join join({&model}, {.divide_by_initial_world_size = variant.by_size});
  const int stride = variant.accumulate ? 2 : 1;
  for (int step = 0; step + stride <= mine; step += stride) {
    optimizer.zero_grad();
    std::vector<int> steps;
    for (int i = 0; i < stride; ++i) steps.push_back(step + i);
    const auto expected = Expected(net, inputs, steps, variant.by_size);
    for (const int number : steps) {
      const auto guard = model.no_sync(number != steps.back());
      model.forward(Input(group->rank(), number)).pow(2).mean().backward();
    }
    for (const auto& item : net->named_parameters()) {
      if (!item.value().requires_grad()) continue;
      const torch::Tensor& wanted = expected.at(item.key());
      EXPECT_EQ(item.value().grad().defined(), wanted.defined()) << item.key();
      if (!wanted.defined() || !item.value().grad().defined()) continue;
      EXPECT_TRUE(IsClose(item.value().grad(), wanted)) << item.key() << " in step " << step;
    }
    optimizer.step();
  }
  join.finish();
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->parameters())));
  EXPECT_EQ(buffers_seen > 0, variant.buffer_hook);
  // Training continues without a Join, with all ranks.
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto expected =
        Expected(net, std::vector<int>(inputs.size(), 100), {50 + step}, /*by_size=*/true);
    model.forward(Input(group->rank(), 50 + step)).pow(2).mean().backward();
    EXPECT_TRUE(IsClose(net->first->weight.grad(), expected.at("first.weight")))
        << "after the join";
  }
}

// Returns numbers of inputs: rank 0 joins first; rank 0 joins last; one rank has no input.
std::vector<std::vector<int>> Inputs(int size) {
  if (size == 2) return {{2, 6}, {6, 2}, {0, 4}, {4, 0}};
  return {{2, 6, 4}, {4, 0, 2}};
}

void TryAll(const std::shared_ptr<ProcessGroup>& group, const std::vector<Variant>& variants) {
  for (const Variant& variant : variants) {
    for (const std::vector<int>& inputs : Inputs(group->size())) {
      TrainUnevenly(group, variant, inputs);
    }
  }
}

RANK_TEST(UnevenInputsTest, Plain, {2, 3}) { TryAll(init_process_group(), {{}}); }

// The joined rank sums its slice of the others' gradients, and no part of a bucket that is skipped.
RANK_TEST(UnevenInputsTest, LargeGradientsInSharedMemory, {2, 3}) {
  constexpr int kWidth = 4096;
  const DistributedDataParallelOptions skips{
      .bucket_cap_mb = 1e-5, .find_unused_parameters = true, .skip_all_reduce_unused_params = true};
  TryAll(init_process_group(), {{.width = kWidth},
                                {.by_size = false, .width = kWidth},
                                {.accumulate = true, .width = kWidth},
                                {.options = skips, .freeze_unused = false, .width = kWidth}});
}

THREAD_RANK_TEST(UnevenInputsTest, SmallBucketsAndViews, 2) {
  TryAll(group, {{.options = {.bucket_cap_mb = 1e-5, .gradient_as_bucket_view = true}}});
}

// A parameter that no rank uses gets no gradient, whatever joined ranks contribute.
THREAD_RANK_TEST(UnevenInputsTest, UnusedParameters, 2, 3) {
  TryAll(group, {{.options = {.bucket_cap_mb = 1e-5, .find_unused_parameters = true},
                  .freeze_unused = false},
                 {.options = {.bucket_cap_mb = 1e-5,
                              .find_unused_parameters = true,
                              .skip_all_reduce_unused_params = true},
                  .freeze_unused = false}});
}

THREAD_RANK_TEST(UnevenInputsTest, StaticGraph, 2, 3) {
  TryAll(group,
         {{.options = {.bucket_cap_mb = 1e-5, .static_graph = true}, .freeze_unused = false}});
}

THREAD_RANK_TEST(UnevenInputsTest, Accumulation, 2) {
  TryAll(group, {{.accumulate = true}, {.options = {.static_graph = true}, .accumulate = true}});
}

THREAD_RANK_TEST(UnevenInputsTest, CommHooks, 2) {
  TryAll(group, {{.hook = true}, {.buffer_hook = true}});
}

THREAD_RANK_TEST(UnevenInputsTest, DelayedParameters, 2) {
  TryAll(group, {{.delayed = true},
                 {.options = {.bucket_cap_mb = 1e-5}, .by_size = false, .delayed = true}});
}

THREAD_RANK_TEST(UnevenInputsTest, DividedByActiveRanks, 2, 3) {
  TryAll(group, {{.by_size = false}});
}

THREAD_RANK_TEST(UnevenInputsTest, BucketsFollowAnActiveRank, 2) {
  Net net;
  Randomize(*net, 1);
  DistributedDataParallel model(net, group, {.bucket_cap_mb = 1e-5, .static_graph = true});
  // Rank 0 has no input and has seen no gradient; the order of the rebuilt buckets is still right.
  ddp::join({&model}, {}, [&] {
    if (group->rank() == 0) return;
    for (int step = 0; step < 2; ++step) model.forward(Input(1, step)).sum().backward();
  });
  EXPECT_EQ(model.bucket_layout().front().front().substr(0, 4), "last");
  EXPECT_THAT(model.bucket_layout().back().front(), HasSubstr("unused"));
}

THREAD_RANK_TEST(UnevenInputsTest, EarlyTerminationThrowsEverywhere, 2) {
  Net net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  const int mine = group->rank() == 0 ? 1 : 3;
  const std::string text = ErrorOf<ReductionError>([&] {
    Join join({&model}, {.throw_on_early_termination = true});
    for (int step = 0; step < mine; ++step) {
      model.forward(Input(group->rank(), step)).sum().backward();
    }
    join.finish();
  });
  EXPECT_THAT(text, HasSubstr(group->rank() == 0 ? "Rank 0 exhausted all inputs."
                                                 : "at least one rank that exhausted inputs"));
}

// Rank 0 has inputs at first, or has none.
THREAD_RANK_TEST(UnevenInputsTest, OneBackwardThroughTwoModelsIsRefused, 2) {
  Net a, b;
  for (const Net& net : {a, b}) {
    net->unused->weight.set_requires_grad(false);
    net->unused->bias.set_requires_grad(false);
  }
  DistributedDataParallel first(a, group), second(b, group);
  enum class Way { kSum, kChain, kOneByOne };
  const auto run = [&](Way way, int mine) {
    ddp::join({&first, &second}, {}, [&] {
      for (int step = 0; step < mine; ++step) {
        a->zero_grad();
        b->zero_grad();
        const torch::Tensor x = Input(group->rank(), step);
        const torch::Tensor p = first.forward(x);
        const torch::Tensor q =
            second.forward(way == Way::kChain ? torch::cat({p, x.narrow(1, 0, 1)}, 1) : x);
        if (way == Way::kOneByOne) p.sum().backward();
        (way == Way::kSum ? p.sum() + q.sum() : q.sum()).backward();
      }
    });
  };
  for (const Way way : {Way::kSum, Way::kChain}) {
    for (const int of_rank_0 : {1, 0}) {
      const std::string text =
          ErrorOf<c10::Error>([&] { run(way, group->rank() == 0 ? of_rank_0 : 3); });
      EXPECT_THAT(text, AllOf(HasSubstr("under a Join, the reduction of gradients"),
                              HasSubstr("began before the collectives of joinable 1"),
                              HasSubstr("NetImpl"), HasSubstr("one backward goes through both")));
    }
  }
  run(Way::kOneByOne, group->rank() == 0 ? 1 : 3);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(a->parameters())));
}

// A loop that catches the exceptions of its steps: finish() reports that the models were not made
// equal.
THREAD_RANK_TEST(UnevenInputsTest, FinishAfterAFailedStepThrows, 2) {
  Net net;
  net->unused->weight.set_requires_grad(false);
  net->unused->bias.set_requires_grad(false);
  DistributedDataParallel model(net, group);
  Join join({&model});
  int failed = 0;
  for (int step = 0; step < 3; ++step) {
    try {
      const bool wrong = group->rank() == 1 && step == 1;
      model.forward(wrong ? torch::ones({1, 7}) : Input(group->rank(), step)).sum().backward();
    } catch (const c10::Error&) {
      ++failed;
    }
  }
  EXPECT_EQ(failed, 2);  // the step itself, and the next one: the Join has ended
  EXPECT_THAT(ErrorOf<ReductionError>([&] { join.finish(); }),
              HasSubstr("that an exception has ended, so the models were not made equal"));
  net->zero_grad();
  model.forward(Input(group->rank(), 5)).sum().backward();
  EXPECT_TRUE(SameOnAllRanks(*group, ::ddp::testing::Gradients(*net)));
}

// The ranks announce different events: the message names them.
THREAD_RANK_TEST(UnevenInputsTest, DisagreementNamesTheEvents, 2) {
  Net a, b;
  DistributedDataParallel first(a, group), second(b, group);
  EXPECT_THAT(ErrorOf<ReductionError>([&] {
                ddp::join({&first, &second}, {}, [&] {
                  auto& model = group->rank() == 0 ? first : second;
                  static_cast<void>(model.forward(Input(group->rank(), 0)));
                });
              }),
              AllOf(HasSubstr("rank 0 came to a forward that begins with buffers of joinable 0 ("),
                    HasSubstr("NetImpl), rank 1 came to a forward that begins with buffers of "
                              "joinable 1 (")));
}

THREAD_RANK_TEST(UnevenInputsTest, UnfinishedReductionIsFoundAtTheExit, 2) {
  Net net;  // "unused" is never used
  DistributedDataParallel model(net, group);
  EXPECT_THAT(ErrorOf<c10::Error>([&] {
                Join join({&model});
                model.forward(Input(group->rank(), 0)).sum().backward();
                join.finish();
              }),
              HasSubstr("no gradient came for unused.weight, unused.bias"));
}

}  // namespace
}  // namespace ddp
