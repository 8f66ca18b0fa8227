// Tests that defects of PyTorch 2.11's data parallelism are not in this library. docs/parity.md has
// the list; testing/oracle/defects.py shows the same cases on PyTorch. The fourteenth defect is
// about samplers: testing/oracle/sampler_test.cc.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>

#include "ddp/comm_hook.h"
#include "ddp/ddp.h"
#include "ddp/default_hooks.h"
#include "ddp/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"
#include "testing/throw_in_backward.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Gradients;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::ThrowInBackward;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A layer whose gradient is its input.
torch::nn::Linear OneWeight() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  torch::NoGradGuard no_grad;
  net->weight.zero_();
  return net;
}

torch::Tensor X(double value) { return torch::full({1, 1}, value); }

torch::Tensor Ones(int64_t features) { return torch::ones({1, features}); }

torch::nn::Sequential Layers(int count, int64_t width) {
  torch::nn::Sequential net;
  for (int layer = 0; layer < count; ++layer) net->push_back(torch::nn::Linear(width, width));
  return net;
}

struct OptionalImpl : torch::nn::Module {
  OptionalImpl() {
    always = register_module("always", torch::nn::Linear(2, 2));
    sometimes = register_module("sometimes", torch::nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x, bool use) {
    const torch::Tensor y = always->forward(x);
    return use ? sometimes->forward(y) : y;
  }
  torch::nn::Linear always{nullptr}, sometimes{nullptr};
};
TORCH_MODULE(Optional);

RANK_TEST(DefectsOnRanksTest, Defect01SecondBackwardIsReducedOrRefused, 2) {
  const auto group = init_process_group();
  const double mine = group->rank() + 1;  // the average is 1.5
  auto net = OneWeight();
  DistributedDataParallel model(net, group);
  const torch::Tensor first = model.forward(X(mine)).sum();
  const torch::Tensor second = model.forward(X(10 * mine)).sum();
  first.backward({}, /*retain_graph=*/true);
  second.backward();
  EXPECT_EQ(net->weight.grad().item<float>(), 16.5);
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  EXPECT_THAT(ErrorOf<ReductionError>([&] { first.backward(); }),
              AllOf(HasSubstr("a second gradient for parameter weight"),
                    HasSubstr("A synchronized forward allows one backward")));
}

RANK_TEST(DefectsOnRanksTest, Defect02StaticGraphWorksWithNoSync, 2) {
  const auto group = init_process_group();
  const double mine = group->rank() + 1;
  auto net = OneWeight();
  DistributedDataParallel model(net, group, {.static_graph = true});
  for (int window = 0; window < 3; ++window) {
    net->zero_grad();
    for (int micro = 0; micro < 2; ++micro) {
      const auto guard = model.no_sync();
      model.forward(X(mine)).sum().backward();
    }
    model.forward(X(mine)).sum().backward();
    EXPECT_EQ(net->weight.grad().item<float>(), 4.5) << "window " << window;
  }
}

RANK_TEST(DefectsOnRanksTest, Defect03UnusedStaysUndefinedWhenARankHasJoined, 2) {
  const auto group = init_process_group();
  Optional net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  join({&model}, {}, [&] {
    for (int step = 0; step < (group->rank() == 0 ? 3 : 1); ++step) {
      net->zero_grad();
      model.forward(Ones(2), /*use=*/step != 1).sum().backward();
      EXPECT_EQ(net->sometimes->weight.grad().defined(), step != 1) << "step " << step;
    }
  });
}

RANK_TEST(DefectsOnRanksTest, Defect04StaticGraphWithARankThatJoinsAtOnce, 2) {
  const auto group = init_process_group();
  auto net = OneWeight();
  DistributedDataParallel model(net, group, {.static_graph = true});
  join({&model}, {}, [&] {
    for (int step = 0; step < (group->rank() == 0 ? 3 : 0); ++step) {
      net->zero_grad();
      model.forward(X(3)).sum().backward();
      EXPECT_EQ(net->weight.grad().item<float>(), 1.5) << "step " << step;
    }
  });
}

RANK_TEST(DefectsOnRanksTest, Defect05BucketsFollowARankWithInputs, 2) {
  const auto group = init_process_group();
  auto net = Layers(3, 2);
  DistributedDataParallel model(net, group);
  join({&model}, {}, [&] {
    for (int step = 0; step < (group->rank() == 0 ? 0 : 3); ++step) {
      model.forward(Ones(2)).sum().backward();
    }
  });
  EXPECT_THAT(model.bucket_layout(), ElementsAre(ElementsAre("2.bias", "2.weight", "1.bias",
                                                             "1.weight", "0.bias", "0.weight")));
}

// Two layers of one shape, in the order that the caller gives.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(bool swapped) {
    for (const char* name : swapped ? std::array{"b", "a"} : std::array{"a", "b"}) {
      layers.emplace(name, register_module(name, torch::nn::Linear(1, 1)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layers.at("a")->forward(x) + layers.at("b")->forward(x);
  }
  std::map<std::string, torch::nn::Linear> layers;
};
TORCH_MODULE(Pair);

RANK_TEST(DefectsOnRanksTest, Defect06DifferentModelsAreNamedAtOnce, 2) {
  const auto group = init_process_group();
  const bool other = group->rank() == 1;
  const auto text = [&](auto net, const DistributedDataParallelOptions& options = {}) {
    return ErrorOf<ConfigurationError>(
        [&] { DistributedDataParallel<torch::nn::Module>(net.ptr(), group, options); });
  };
  std::vector<std::string> texts;
  texts.push_back(text(Pair(other)));
  EXPECT_THAT(texts.back(), AllOf(HasSubstr("a.weight"), HasSubstr("b.weight")));

  torch::nn::Linear wide(64, 64);
  if (other) wide->to(torch::kDouble);
  texts.push_back(text(wide));
  EXPECT_THAT(texts.back(), AllOf(HasSubstr("weight"), HasSubstr("loat"), HasSubstr("ouble")));

  auto frozen = Layers(2, 2);
  for (torch::Tensor& parameter : frozen[static_cast<size_t>(group->rank())]->parameters()) {
    parameter.set_requires_grad(false);
  }
  texts.push_back(text(frozen));
  EXPECT_THAT(texts.back(), HasSubstr("0.weight"));

  auto buffered = OneWeight();
  if (other) buffered->register_buffer("extra", torch::zeros({1}));
  texts.push_back(text(buffered));
  EXPECT_THAT(texts.back(), HasSubstr("extra"));

  texts.push_back(text(OneWeight(), {.gradient_as_bucket_view = other}));
  EXPECT_THAT(texts.back(), HasSubstr("gradient_as_bucket_view"));

  // The text is the same on every rank, and the group is still usable.
  for (const std::string& each : texts) {
    EXPECT_THAT(each, StartsWith("the ranks have different models: "));
    EXPECT_TRUE(SameOnAllRanks(
        *group, torch::tensor(static_cast<int64_t>(std::hash<std::string>()(each)))));
  }
}

RANK_TEST(DefectsOnRanksTest, Defect07UnusedOnOneRankIsNewsForAll, 2) {
  const auto group = init_process_group();  // with a timeout of half an hour
  Optional net;
  DistributedDataParallel model(net, group);
  const bool culprit = group->rank() == 1;
  const std::string text = ErrorOf<std::exception>([&] {
    for (int step = 0; step < 2; ++step) {
      model.forward(Ones(2), /*use=*/!culprit).sum().backward();
    }
  });
  EXPECT_THAT(text, HasSubstr("no gradient came for sometimes.weight, sometimes.bias"));
  EXPECT_THAT(text, HasSubstr("rank 1"));
}

struct ExplosiveNetImpl : torch::nn::Module {
  ExplosiveNetImpl() {
    first = register_module("first", torch::nn::Linear(2, 2));
    last = register_module("last", torch::nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x, bool explode) {
    torch::Tensor y = first->forward(x);
    if (explode) y = ThrowInBackward(y, "thrown in the backward");
    return last->forward(y);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(ExplosiveNet);

RANK_TEST(DefectsOnRanksTest, Defect08ExceptionInABackwardDoesNotStick, 2) {
  const auto group = init_process_group();
  ExplosiveNet net;
  DistributedDataParallel model(net, group);
  for (int round = 0; round < 2; ++round) {
    const auto step = [&](bool explode) {
      net->zero_grad();
      model.forward(Ones(2), explode).sum().backward();
    };
    EXPECT_EQ(ErrorOf<std::exception>([&] { step(false); }), "no error");
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    // The error is this rank's own, or that of the other rank, which may be faster.
    EXPECT_THAT(ErrorOf<std::exception>([&] { step(true); }),
                AnyOf(HasSubstr("thrown in the backward"), HasSubstr("an exception ended the")));
  }
  EXPECT_EQ(ErrorOf<std::exception>([&] {
              net->zero_grad();
              model.forward(Ones(2), false).sum().backward();
            }),
            "no error");
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

TensorFuture Completed(const torch::Tensor& tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->markCompleted(tensor);
  return future;
}

RANK_TEST(DefectsOnRanksTest, Defect09HookResultsAreChecked, 2) {
  const auto group = init_process_group();
  using Change = std::function<torch::Tensor(const torch::Tensor&)>;
  const std::vector<std::pair<Change, std::string>> changes = {
      {[](const torch::Tensor& buffer) { return buffer.to(torch::kDouble); }, "ouble"},
      {[](const torch::Tensor& buffer) { return buffer.slice(0, 0, 1).clone(); }, "[1]"},
  };
  for (const auto& [change, named] : changes) {
    torch::nn::Linear net(4, 4);
    DistributedDataParallel model(net, group);
    group->barrier();  // no rank fails before all have their model
    model.register_comm_hook(change, [](const Change& change, GradBucket& bucket) {
      return Completed(change(bucket.buffer()));
    });
    EXPECT_THAT(ErrorOf<std::exception>([&] { model.forward(Ones(4)).sum().backward(); }),
                AllOf(HasSubstr("the comm hook's result for gradient bucket 0"), HasSubstr(named),
                      HasSubstr("weight")));
  }
}

RANK_TEST(DefectsOnRanksTest, Defect10HooksSeeTheTrueIndexInAStaticGraph, 2) {
  const auto group = init_process_group();
  auto net = Layers(4, 16);
  DistributedDataParallel model(net, group, {.bucket_cap_mb_list = {0.001}, .static_graph = true});
  auto seen = std::make_shared<std::vector<int>>();
  model.register_comm_hook(seen, [](const auto& seen, GradBucket& bucket) {
    seen->push_back(bucket.index());
    EXPECT_EQ(bucket.is_last(), bucket.index() == 3);
    return Completed(bucket.buffer());
  });
  for (int step = 0; step < 3; ++step) {
    seen->clear();
    model.forward(Ones(16)).sum().backward();
    EXPECT_THAT(*seen, ElementsAre(0, 1, 2, 3)) << "step " << step;
  }
}

RANK_TEST(DefectsOnRanksTest, Defect11TwoForwardsOfABatchNorm, 2) {
  const auto group = init_process_group();
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  DistributedDataParallel model(net, group);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    torch::manual_seed(group->rank());
    const torch::Tensor first = model.forward(torch::randn({4, 2})).pow(3).sum();
    const torch::Tensor second = model.forward(torch::randn({4, 2})).pow(3).sum();
    EXPECT_EQ(ErrorOf<std::exception>([&] { (first + second).backward(); }), "no error");
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

// On three ranks, because a third has no exact binary form.
RANK_TEST(DefectsOnRanksTest, Defect12ViewsRoundAsCopiesDo, 3) {
  const auto group = init_process_group();
  std::vector<float> gradients;
  for (const bool view : {false, true}) {
    auto net = OneWeight();
    DistributedDataParallel model(net, group, {.gradient_as_bucket_view = view});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(/*set_to_none=*/false);
      model.forward(X(0.7 * (group->rank() + 1) + 0.35)).sum().backward();
      gradients.push_back(net->weight.grad().item<float>());
    }
  }
  EXPECT_THAT(gradients, Each(gradients.front()));
}

// Returns how many buckets start before the last gradient is there, in each of some iterations.
template <typename Model>
std::vector<int> EarlyBuckets(Model& model, int iterations) {
  auto events = std::make_shared<std::vector<char>>();
  for (torch::Tensor& parameter : model.module()->parameters()) {
    parameter.register_hook([events](const torch::Tensor&) { events->push_back('g'); });
  }
  model.register_comm_hook(events, [](const auto& events, GradBucket& bucket) {
    events->push_back('b');
    return Completed(bucket.buffer());
  });
  std::vector<int> early;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    events->clear();
    model.forward(Ones(16)).sum().backward();
    const auto last = std::find(events->rbegin(), events->rend(), 'g');
    early.push_back(static_cast<int>(std::count(last, events->rend(), 'b')));
  }
  return early;
}

RANK_TEST(DefectsOnRanksTest, Defect13ReductionOverlapsAtOnce, 2) {
  const auto group = init_process_group();
  {
    DistributedDataParallel model(Layers(4, 16), group, {.bucket_cap_mb = 0.001});
    EXPECT_THAT(EarlyBuckets(model, 3), Each(3));
  }
  {
    // The first iteration of a static graph records the gradients to wait for.
    DistributedDataParallel model(Layers(4, 16), group,
                                  {.bucket_cap_mb = 0.001, .static_graph = true});
    EXPECT_THAT(EarlyBuckets(model, 3), ElementsAre(0, 3, 3));
  }
  // The buckets are rebuilt also with find_unused_parameters, on request.
  DistributedDataParallel model(Layers(3, 16), group, {.find_unused_parameters = true});
  model.forward(Ones(16)).sum().backward();
  const auto registered = model.bucket_layout();
  EXPECT_EQ(registered.front().front(), "0.weight");
  model.rebuild_buckets();
  model.forward(Ones(16)).sum().backward();
  EXPECT_EQ(model.bucket_layout().front().front(), "2.bias");
}

}  // namespace
}  // namespace ddp
