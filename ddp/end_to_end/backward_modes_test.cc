// Tests every way in which a training loop may call forward and backward. The averages are compared
// with a computation of one process from all ranks' inputs. The ranks are threads on a fake
// backend. In four cases they are processes on Gloo: two read what all of a process write, two test
// Gloo too.
//
// Length: one case for each way to call backward, compared with one process by the same helpers.
#include <torch/torch.h>

#include <map>
#include <optional>
#include <tuple>

#include "ddp/activation_checkpoint.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/device_mesh.h"
#include "ddp/distributed_data_parallel.h"
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
using ::ddp::testing::Gradients;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::SameOnAllRanks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Two heads on one trunk; the forward may leave out each head.
struct HeadsImpl : torch::nn::Module {
  HeadsImpl() {
    trunk = register_module("trunk", torch::nn::Linear(3, 4));
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
    spare = register_module("spare", torch::nn::Linear(4, 2));
  }
  std::map<std::string, torch::Tensor> forward(const torch::Tensor& x, bool use_left,
                                               bool use_right) {
    const torch::Tensor y = torch::tanh(trunk->forward(x));
    std::map<std::string, torch::Tensor> outputs;
    if (use_left) outputs["left"] = left->forward(y);
    if (use_right) outputs["right"] = right->forward(y);
    return outputs;
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr}, spare{nullptr};
};
TORCH_MODULE(Heads);

// Two layers without common parameters: the outputs have disjoint parameters.
struct DisjointOutputs {
  torch::Tensor first;
  std::optional<torch::Tensor> second;
};
struct DisjointImpl : torch::nn::Module {
  DisjointImpl() {
    first = register_module("first", torch::nn::Linear(3, 2));
    second = register_module("second", torch::nn::Linear(3, 2));
  }
  DisjointOutputs forward(const torch::Tensor& x) {
    return {first->forward(x), second->forward(x)};
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Disjoint);

torch::Tensor Input(int rank, int step) { return RandomNumbers(100 * step + rank, {4, 3}); }

torch::Tensor Sum(const std::map<std::string, torch::Tensor>& outputs) {
  torch::Tensor sum = torch::zeros({});
  for (const auto& [name, output] : outputs) sum = sum + output.pow(2).mean();
  return sum;
}

Heads Copy(const Heads& net) {
  torch::NoGradGuard no_grad;
  Heads copy;
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    copy->parameters()[i].copy_(net->parameters()[i]);
  }
  return copy;
}

// Returns the gradients by name, computed by one process. `use` gives the heads that a rank uses.
std::map<std::string, torch::Tensor> Expected(
    const Heads& net, int ranks, int step, const std::function<std::pair<bool, bool>(int)>& use) {
  Heads copy = Copy(net);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto [left, right] = use(rank);
    (Sum(copy->forward(Input(rank, step), left, right)) / ranks).backward();
  }
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& item : copy->named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

void ExpectGradients(const torch::nn::Module& net,
                     const std::map<std::string, torch::Tensor>& expected) {
  for (const auto& item : net.named_parameters()) {
    const torch::Tensor& wanted = expected.at(item.key());
    const torch::Tensor gradient = item.value().grad();
    ASSERT_EQ(gradient.defined(), wanted.defined()) << item.key();
    if (!wanted.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient, wanted, 1e-5, 1e-7)) << item.key();
  }
}

// ---- Unused parameters.

THREAD_RANK_TEST(BackwardModesTest, UnusedParametersAreFound, 2, 3) {
  for (const bool skip : {false, true}) {
    for (const bool view : {false, true}) {
      Heads net;
      DistributedDataParallel model(net, group,
                                    {.bucket_cap_mb = 1e-5,
                                     .gradient_as_bucket_view = view,
                                     .find_unused_parameters = true,
                                     .skip_all_reduce_unused_params = skip});
      const auto initial = model.bucket_layout();
      // Left only; one head on each rank; right on rank 0 only, while the other ranks use left and
      // the trunk.
      const std::vector<std::function<std::pair<bool, bool>(int)>> uses = {
          [](int) { return std::pair(true, false); },
          [](int rank) { return std::pair(rank % 2 == 0, rank % 2 == 1); },
          [](int rank) { return std::pair(true, rank == 0); },
          [](int) { return std::pair(true, true); }};
      for (int step = 0; step < 8; ++step) {
        const auto& use = uses[step % uses.size()];
        net->zero_grad(/*set_to_none=*/true);
        const auto [left, right] = use(group->rank());
        const auto expected = Expected(net, group->size(), step, use);
        Sum(model.forward(Input(group->rank(), step), left, right)).backward();
        ExpectGradients(*net, expected);  // undefined stays undefined, also of "spare"
        EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
      }
      EXPECT_EQ(model.bucket_layout(), initial);
      model.rebuild_buckets();
      net->zero_grad();
      Sum(model.forward(Input(group->rank(), 9), true, true)).backward();
      EXPECT_NE(model.bucket_layout(), initial);
      EXPECT_EQ(model.logging_data().can_set_static_graph, false);
    }
  }
}

THREAD_RANK_TEST(BackwardModesTest, UnusedParametersWithAccumulation, 2) {
  Heads net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto left = [](int) { return std::pair(true, false); };
    const auto right = [](int) { return std::pair(false, true); };
    auto expected = Expected(net, group->size(), step, left);
    for (const auto& [name, gradient] : Expected(net, group->size(), step + 50, right)) {
      if (!gradient.defined()) continue;
      expected[name] = expected[name].defined() ? expected[name] + gradient : gradient;
    }
    {
      const auto guard = model.no_sync();
      Sum(model.forward(Input(group->rank(), step), true, false)).backward();
    }
    // The left head was used under no_sync() only, and counts as used.
    Sum(model.forward(Input(group->rank(), step + 50), false, true)).backward();
    ExpectGradients(*net, expected);
  }
}

// A forward may reach no parameter: the other ranks must not wait for its gradients.
struct MaybeImpl : torch::nn::Module {
  MaybeImpl() { layer = register_module("layer", torch::nn::Linear(3, 1)); }
  torch::Tensor forward(const torch::Tensor& x, bool use) {
    return use ? layer->forward(x).sum() : x.sum();
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Maybe);

THREAD_RANK_TEST(BackwardModesTest, ForwardWithoutParametersTakesPart, 2) {
  Maybe net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const bool use = group->rank() != 1;
    const torch::Tensor loss = model.forward(torch::ones({1, 3}).requires_grad_(), use);
    if (use) loss.backward();
    EXPECT_TRUE(
        torch::allclose(net->layer->weight.grad(), torch::full({1, 3}, 1.0 - 1.0 / group->size())));
  }
}

// ---- Outputs that the loss does not use.

// Two outputs on one trunk, the second one deep in containers.
using NestedOutputs = std::tuple<torch::Tensor, std::map<std::string, std::vector<torch::Tensor>>>;
struct TwoOutputsImpl : torch::nn::Module {
  TwoOutputsImpl() {
    trunk = register_module("trunk", torch::nn::Linear(3, 4));
    p = register_module("p", torch::nn::Linear(4, 2));
    q = register_module("q", torch::nn::Linear(4, 2));
    never = register_module("never", torch::nn::Linear(4, 2));
  }
  NestedOutputs forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::tanh(trunk->forward(x));
    return {p->forward(y), {{"q", {q->forward(y)}}}};
  }
  torch::nn::Linear trunk{nullptr}, p{nullptr}, q{nullptr}, never{nullptr};
};
TORCH_MODULE(TwoOutputs);

torch::Tensor LossOf(const NestedOutputs& outputs, bool use_p, bool use_q) {
  torch::Tensor loss = torch::zeros({});
  if (use_p) loss = loss + std::get<0>(outputs).pow(2).mean();
  if (use_q) loss = loss + std::get<1>(outputs).at("q")[0].pow(2).mean();
  return loss;
}

// Returns the expected gradients, computed by one process. `use` gives the outputs in a rank's
// loss, by step.
std::map<std::string, torch::Tensor> ExpectedOfOutputs(
    const TwoOutputs& net, int ranks, const std::vector<int>& steps,
    const std::function<std::pair<bool, bool>(int rank, int step)>& use) {
  TwoOutputs copy;
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      copy->parameters()[i].copy_(net->parameters()[i]);
    }
  }
  for (const int step : steps) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto [p, q] = use(rank, step);
      (LossOf(copy->forward(Input(rank, step)), p, q) / ranks).backward();
    }
  }
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& item : copy->named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

THREAD_RANK_TEST(BackwardModesTest, OutputsMayBeLeftOutOfTheLoss, 2) {
  const int rank = group->rank();
  using Use = std::function<std::pair<bool, bool>(int rank, int step)>;
  const std::vector<Use> uses = {
      [](int, int) { return std::pair(true, false); },               // q never
      [](int, int step) { return std::pair(true, step % 2 == 1); },  // by step
      [](int r, int) { return std::pair(true, r == 0); },            // by rank
      [](int r, int) { return std::pair(r == 0, r != 0); }};         // one on each
  for (const auto& [skip, view] : {std::pair(false, false), {false, true}, {true, false}}) {
    for (size_t u = 0; u < uses.size(); ++u) {
      const Use& use = uses[u];
      TwoOutputs net;
      DistributedDataParallel model(net, group,
                                    {.bucket_cap_mb = 1e-5,
                                     .gradient_as_bucket_view = view,
                                     .find_unused_parameters = true,
                                     .skip_all_reduce_unused_params = skip});
      for (int step = 0; step < 4; ++step) {
        const auto [p, q] = use(rank, step);
        net->zero_grad(/*set_to_none=*/true);
        const auto expected = ExpectedOfOutputs(net, group->size(), {step}, use);
        LossOf(model.forward(Input(rank, step)), p, q).backward();
        model.check_finished();
        SCOPED_TRACE(std::to_string(u) + " in step " + std::to_string(step));
        ExpectGradients(*net, expected);
        EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
      }
    }
  }
}

THREAD_RANK_TEST(BackwardModesTest, OutputsLeftOutWithAccumulation, 2) {
  const int rank = group->rank();
  TwoOutputs net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  const auto use = [](int, int step) { return std::pair(step % 2 == 0, step % 2 == 1); };
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    // Only the backward under no_sync() used q: its gradient is averaged with p's.
    const auto expected = ExpectedOfOutputs(net, group->size(), {2 * step + 1, 2 * step + 2}, use);
    {
      const auto guard = model.no_sync();
      LossOf(model.forward(Input(rank, 2 * step + 1)), false, true).backward();
    }
    LossOf(model.forward(Input(rank, 2 * step + 2)), true, false).backward();
    ExpectGradients(*net, expected);
  }
  // Each output has its own backward, and both share a trunk: both gradients are averaged.
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto expected = ExpectedOfOutputs(net, group->size(), {step},
                                            [](int, int) { return std::pair(true, true); });
    const auto outputs = model.forward(Input(rank, step));
    LossOf(outputs, true, false).backward({}, /*retain_graph=*/true);
    LossOf(outputs, false, true).backward();
    ExpectGradients(*net, expected);
    EXPECT_THAT(ErrorOf<ReductionError>([&] { LossOf(outputs, true, false).backward(); }),
                HasSubstr("a second gradient for parameter"));
  }
  // A static graph records that q is never used.
  TwoOutputs fixed;
  DistributedDataParallel learned(fixed, group, {.static_graph = true});
  const auto only_p = [](int, int) { return std::pair(true, false); };
  for (int step = 0; step < 3; ++step) {
    fixed->zero_grad();
    const auto expected = ExpectedOfOutputs(fixed, group->size(), {step}, only_p);
    LossOf(learned.forward(Input(rank, step)), true, false).backward();
    ExpectGradients(*fixed, expected);
  }
}

// The backward reaches q, but its inputs leave q out: the missing gradient is an error.
THREAD_RANK_TEST(BackwardModesTest, ParameterThatIsReachedAndMissingIsNamed, 2) {
  TwoOutputs net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  std::vector<torch::Tensor> inputs = net->parameters();
  inputs.erase(inputs.begin() + 4, inputs.begin() + 6);  // q's
  EXPECT_THAT(ErrorOf<c10::Error>([&] {
                LossOf(model.forward(Input(group->rank(), 0)), true, true)
                    .backward({}, std::nullopt, false, inputs);
                model.forward(Input(group->rank(), 1));
              }),
              AllOf(HasSubstr("no gradient came for q.weight, q.bias"), HasSubstr("inputs")));
  // autograd::grad() begins no reduction.
  net->zero_grad();
  const torch::Tensor x = Input(group->rank(), 2).requires_grad_();
  const auto outputs = model.forward(x);
  torch::autograd::grad({std::get<0>(outputs).sum()}, {x}, {}, /*retain_graph=*/true);
  LossOf(outputs, true, false).backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  EXPECT_FALSE(net->q->weight.grad().defined());
}

// ---- The bare module.

THREAD_RANK_TEST(BackwardModesTest, BareModuleAccumulatesLocally, 2) {
  const int rank = group->rank();
  const auto loss = [](const NestedOutputs& outputs) { return LossOf(outputs, true, true); };
  for (const bool find_unused : {false, true}) {
    for (const bool view : {false, true}) {
      TwoOutputs net;
      for (auto& parameter : net->never->parameters()) parameter.set_requires_grad(false);
      DistributedDataParallel model(
          net, group, {.gradient_as_bucket_view = view, .find_unused_parameters = find_unused});
      const auto local = [&](int step) {
        const auto bare = [&] { loss(net->forward(Input(rank, step))).backward(); };
        const torch::Tensor before = net->p->weight.grad().defined()
                                         ? net->p->weight.grad().clone()
                                         : torch::zeros_like(net->p->weight);
        bare();
        EXPECT_FALSE(SameOnAllRanks(*group, net->p->weight.grad() - before));
      };
      const auto synchronized = [&](int step) {
        const torch::Tensor out = loss(model.forward(Input(rank, step)));
        if (step % 2 == 1) local(step + 50);  // also between forward and backward
        out.backward();
        EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
      };
      local(10);  // before the first forward
      for (int step = 0; step < 4; ++step) {
        if (step % 2 == 0) net->zero_grad();
        synchronized(step);
        const torch::Tensor average = Gradients(*net);
        TwoOutputs alone;
        torch::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          alone->parameters()[i].copy_(net->parameters()[i]);
        }
        at::AutoGradMode grad(true);
        for (auto& parameter : alone->never->parameters()) parameter.set_requires_grad(false);
        loss(alone->forward(Input(rank, step + 20))).backward();
        local(step + 20);
        EXPECT_TRUE(torch::allclose(Gradients(*net), average + Gradients(*alone), 1e-5, 1e-7));
      }
    }
  }
}

// Returns the text that `action` writes to standard error.
std::string ErrorOutputOf(const std::function<void()>& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

// Without find_unused_parameters, the next forward throws.
RANK_TEST(BackwardModesTest, AMemberThatIsAssignedAnewIsTold, 2) {
  const auto group = init_process_group();
  for (const int width : {4, 128}) {
    torch::nn::Linear net(width, width);
    DistributedDataParallel model(net, group, {.find_unused_parameters = true});
    const torch::Tensor x = torch::ones({1, width}).set_requires_grad(true);
    const torch::Tensor outside = torch::ones({width, width}).set_requires_grad(true);
    const auto step = [&] { (model.forward(x).sum() + outside.sum()).backward(); };
    EXPECT_THAT(ErrorOutputOf(step), Not(HasSubstr("is no parameter of the model")));
    net->weight = torch::ones({width, width}).set_requires_grad(true);
    const std::string shape = "Float[" + std::to_string(width) + ", " + std::to_string(width) + "]";
    EXPECT_THAT(ErrorOutputOf(step), AllOf(HasSubstr(shape), HasSubstr("not parameter weight of"),
                                           HasSubstr("net->weight.set_data")));
    EXPECT_THAT(ErrorOutputOf(step), Not(HasSubstr("is no parameter of the model")));
  }
}

RANK_TEST(BackwardModesTest, AnIgnoredParameterHidesNoMemberThatIsAssignedAnew, 2) {
  const auto group = init_process_group();
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
  DistributedDataParallel model(
      net, group,
      {.params_and_buffers_to_ignore = {"1.weight", "1.bias"}, .find_unused_parameters = true});
  const auto step = [&] { model.forward(torch::ones({1, 8})).sum().backward(); };
  EXPECT_THAT(ErrorOutputOf(step), Not(HasSubstr("is no parameter of the model")));
  net[0]->as<torch::nn::Linear>()->weight = torch::ones({8, 8}).set_requires_grad(true);
  net->eval();
  EXPECT_THAT(ErrorOutputOf(step), Not(HasSubstr("is no parameter of the model")));
  net->train();
  EXPECT_THAT(ErrorOutputOf(step), HasSubstr("not parameter 0.weight of"));
}

RANK_TEST(BackwardModesTest, BareModuleInTrainingWarnsOnce, 2) {
  const auto group = init_process_group();
  TwoOutputs net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  const auto bare = [&] { LossOf(net->forward(Input(group->rank(), 0)), true, true).backward(); };
  const auto step = [&] { LossOf(model.forward(Input(group->rank(), 0)), true, true).backward(); };
  EXPECT_THAT(ErrorOutputOf([&] {
                step();
                {
                  const auto guard = model.no_sync();
                  bare();
                  step();
                }
                net->eval();
                bare();
                net->train();
                step();
              }),
              Not(HasSubstr("bare module")));
  EXPECT_THAT(ErrorOutputOf(bare), AllOf(HasSubstr("through the bare module"), HasSubstr("no_sync"),
                                         HasSubstr("model.forward"), HasSubstr("parameter q.")));
  EXPECT_THAT(ErrorOutputOf([&] {
                bare();
                step();
                bare();
              }),
              Not(HasSubstr("bare module")));
  EXPECT_THAT(ErrorOutputOf([&] {
                TwoOutputs other;
                DistributedDataParallel fresh(other, group);
                LossOf(other->forward(Input(group->rank(), 0)), true, true).backward();
              }),
              HasSubstr("through the bare module"));
}

// The backward of a loss in a member goes through no output of the forward, but belongs to that
// forward. The same holds for a penalty on a parameter.
struct AuxiliaryImpl : torch::nn::Module {
  AuxiliaryImpl() {
    layer = register_module("layer", torch::nn::Linear(3, 2));
    penalized = register_parameter("penalized", torch::ones({2}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = layer->forward(x);
    kept = (y * 2).sum();
    return y;
  }
  torch::nn::Linear layer{nullptr};
  torch::Tensor penalized, kept;
};
TORCH_MODULE(Auxiliary);

THREAD_RANK_TEST(BackwardModesTest, LossesBesideTheOutputsAreAveraged, 2) {
  for (const bool find_unused : {false, true}) {
    Auxiliary net;
    DistributedDataParallel model(net, group, {.find_unused_parameters = find_unused});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const torch::Tensor y = model.forward(Input(group->rank(), step));
      const torch::Tensor penalty = (net->penalized * (group->rank() + 1)).sum();
      (step == 1   ? net->kept + penalty
       : step == 2 ? y.sum() + penalty
                   : penalty + y.pow(2).sum())
          .backward();
      model.check_finished();
      EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net))) << step;
    }
  }
}

// The gradient by the input depends on the weight through a node of the first backward alone. (That
// of torch::nn::Linear also goes through the forward's weight.t().)
struct ProductImpl : torch::nn::Module {
  explicit ProductImpl(bool with_bias) {
    weight = register_parameter("weight", torch::full({4, 3}, 0.5));
    if (with_bias) bias = register_parameter("bias", torch::zeros({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = x.mm(weight);
    return bias.defined() ? y + bias : y;
  }
  torch::Tensor weight, bias;
};
TORCH_MODULE(Product);

// Backward of the squared gradient by the input: PyTorch averages it too.
void Penalize(DistributedDataParallel<ProductImpl>& model, double factor) {
  const torch::Tensor x = torch::ones({2, 4}).requires_grad_();
  const auto slope =
      torch::autograd::grad({model.forward(x).sum()}, {x}, {}, {}, /*create_graph=*/true)[0];
  (factor * slope.pow(2).sum()).backward();
  model.check_finished();
}

THREAD_RANK_TEST(BackwardModesTest, AGradientPenaltyIsAveraged, 1, 2, 3, 4) {
  for (const bool bias : {false, true}) {
    Product net(bias);
    DistributedDataParallel model(net, group, {.find_unused_parameters = bias});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      Penalize(model, 1 + group->rank());
      const double average = 6 * (group->size() + 1) / 2.0;
      EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({4, 3}, average)))
          << net->weight.grad();
    }
  }
}

THREAD_RANK_TEST(BackwardModesTest, AGradientPenaltyWithoutTheBiasNamesIt, 2) {
  Product net(true);
  DistributedDataParallel model(net, group);
  EXPECT_THAT(ErrorOf<ReductionError>([&] { Penalize(model, 1); }), HasSubstr("bias"));
}

// ---- Static graph.

THREAD_RANK_TEST(BackwardModesTest, StaticGraphLearnsOnce, 1, 2) {
  const auto use = [](int) { return std::pair(true, true); };
  for (const bool view : {false, true}) {
    for (const bool accumulate_first : {false, true}) {
      Heads net;
      DistributedDataParallel model(
          net, group,
          {.bucket_cap_mb = 1e-5, .gradient_as_bucket_view = view, .static_graph = true});
      const auto initial = model.bucket_layout();
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        auto expected = Expected(net, group->size(), step, use);
        if (accumulate_first) {
          for (const auto& [name, gradient] : Expected(net, group->size(), step + 70, use)) {
            if (gradient.defined()) expected[name] = expected[name] + gradient;
          }
          const auto guard = model.no_sync();
          for (int half = 0; half < 2; ++half) {
            (Sum(model.forward(Input(group->rank(), step + 70), true, true)) / 2).backward();
          }
        }
        Sum(model.forward(Input(group->rank(), step), true, true)).backward();
        ExpectGradients(*net, expected);
        EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
        // The buckets are rebuilt after the first synchronized backward.
        EXPECT_EQ(model.bucket_layout().front().front().substr(0, 5), "right");
      }
    }
  }
}

THREAD_RANK_TEST(BackwardModesTest, StaticGraphRefusesChanges, 2) {
  {
    Heads net;
    DistributedDataParallel model(net, group, {.static_graph = true});
    Sum(model.forward(Input(group->rank(), 0), true, true)).backward();
    // Rank 0 may be ahead, and its failure must not reach a rank that is still in this backward.
    group->barrier();
    EXPECT_THAT(ErrorOf<c10::Error>([&] {
                  Sum(model.forward(Input(group->rank(), 1), true, false)).backward();
                  model.forward(Input(group->rank(), 2), true, false);
                }),
                AllOf(HasSubstr("right.weight, right.bias"), HasSubstr("static_graph")));
    // The training continues after all ranks have called it.
    net->zero_grad();
    Sum(model.forward(Input(group->rank(), 2), true, false)).backward();
    ExpectGradients(*net,
                    Expected(net, group->size(), 2, [](int) { return std::pair(true, false); }));
  }
}

// ---- Several forwards, several backwards.

THREAD_RANK_TEST(BackwardModesTest, SeveralForwardsAndBackwards, 2) {
  const auto use = [](int) { return std::pair(true, true); };
  const int rank = group->rank();
  for (const bool find_unused : {false, true}) {
    Heads net;
    net->spare->weight.set_requires_grad(false);
    net->spare->bias.set_requires_grad(false);
    DistributedDataParallel model(net, group, {.find_unused_parameters = find_unused});
    const auto both = [&](int a, int b) {
      auto expected = Expected(net, group->size(), a, use);
      for (const auto& [name, gradient] : Expected(net, group->size(), b, use)) {
        if (gradient.defined()) expected[name] = expected[name] + gradient;
      }
      return expected;
    };
    // Two forwards, one backward.
    net->zero_grad();
    auto expected = both(0, 1);
    (Sum(model.forward(Input(rank, 0), true, true)) +
     Sum(model.forward(Input(rank, 1), true, true)))
        .backward();
    ExpectGradients(*net, expected);
    // Two forwards, two backwards: both are averaged.
    net->zero_grad();
    expected = both(2, 3);
    const torch::Tensor first = Sum(model.forward(Input(rank, 2), true, true));
    const torch::Tensor second = Sum(model.forward(Input(rank, 3), true, true));
    first.backward();
    second.backward({}, /*retain_graph=*/true);
    ExpectGradients(*net, expected);
    // A further backward through a reduced output is an error.
    EXPECT_THAT(ErrorOf<ReductionError>([&] { second.backward(); }),
                HasSubstr("a second gradient for parameter"));
    // A forward under no_sync() stays local, whatever follows it.
    net->zero_grad();
    torch::Tensor local;
    {
      const auto guard = model.no_sync();
      local = Sum(model.forward(Input(rank, 4), true, true));
    }
    const torch::Tensor synchronized = Sum(model.forward(Input(rank, 5), true, true));
    local.backward();
    EXPECT_FALSE(SameOnAllRanks(*group, Gradients(*net)));
    synchronized.backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

THREAD_RANK_TEST(BackwardModesTest, DisjointOutputsOneByOne, 2) {
  for (const bool find_unused : {false, true}) {
    Disjoint net;
    DistributedDataParallel model(net, group, {.find_unused_parameters = find_unused});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const DisjointOutputs outputs = model.forward(Input(group->rank(), step));
      outputs.second->sum().backward();
      outputs.first.sum().backward();
      model.check_finished();
      EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    }
    if (find_unused) {
      // A parameter without a gradient in this backward is unused, also when a later backward
      // reaches it.
      net->zero_grad();
      model.forward(Input(group->rank(), 3)).second->sum().backward();
      model.forward(Input(group->rank(), 4));
      EXPECT_FALSE(net->first->weight.grad().defined());
      EXPECT_TRUE(SameOnAllRanks(*group, net->second->weight.grad()));
      continue;
    }
    // Without find_unused, the next forward finds the error on every rank, only once. (The ranks
    // are not synchronized here: a rank may get another rank's failure report before it finds the
    // error itself.)
    EXPECT_THAT(ErrorOf<c10::Error>([&] {
                  model.forward(Input(group->rank(), 3)).second->sum().backward();
                  model.forward(Input(group->rank(), 4));
                }),
                HasSubstr("no gradient came for first.weight, first.bias"));
    net->zero_grad();
    const DisjointOutputs outputs = model.forward(Input(group->rank(), 5));
    (outputs.first + *outputs.second).sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

// ---- Kinds of parameters and graphs.

// One layer used twice; its weight is registered a third time under another name.
struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    layer = register_module("layer", torch::nn::Linear(3, 3));
    again = register_module("again", torch::nn::Linear(3, 3));
    again->weight = again->register_parameter("weight_of_layer", layer->weight);
  }
  torch::Tensor forward(const torch::Tensor& x, bool checkpointed, bool reentrant) {
    const CheckpointOptions options{.use_reentrant = reentrant};
    torch::Tensor y = x;
    for (int i = 0; i < 2; ++i) {
      y = checkpointed ? checkpoint(options, layer, y) : layer->forward(y);
      y = torch::tanh(y);
    }
    return again->forward(y).pow(2).mean();
  }
  torch::nn::Linear layer{nullptr}, again{nullptr};
};
TORCH_MODULE(Shared);

THREAD_RANK_TEST(BackwardModesTest, SharedAndCheckpointedParameters, 2) {
  struct Way {
    bool checkpointed, reentrant, static_graph, find_unused;
  };
  for (const Way& way : {Way{false, false, false, false}, Way{true, false, false, false},
                         Way{true, false, false, true}, Way{true, true, true, false},
                         Way{true, false, true, false}}) {
    Shared net;
    Randomize(*net, 7);
    for (const auto& item : net->named_parameters()) {
      // The module has it under this name, but does not use it.
      if (item.key() == "again.weight") item.value().set_requires_grad(false);
    }
    DistributedDataParallel model(
        net, group, {.find_unused_parameters = way.find_unused, .static_graph = way.static_graph});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      Shared alone;
      Randomize(*alone, 7);
      for (int rank = 0; rank < group->size(); ++rank) {
        (alone->forward(Input(rank, step), false, false) / group->size()).backward();
      }
      model.forward(Input(group->rank(), step).requires_grad_(), way.checkpointed, way.reentrant)
          .backward();
      EXPECT_TRUE(torch::allclose(net->layer->weight.grad(), alone->layer->weight.grad(), 1e-5));
      EXPECT_TRUE(torch::allclose(net->layer->bias.grad(), alone->layer->bias.grad(), 1e-5));
      EXPECT_TRUE(torch::allclose(net->again->bias.grad(), alone->again->bias.grad(), 1e-5));
      EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    }
  }
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    first = register_module("first", torch::nn::Linear(3, 3));
    again = register_parameter("again", first->weight);
    bias = register_parameter("bias", torch::zeros({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(torch::tanh(first->forward(x)), again, bias).pow(2).sum();
  }
  torch::nn::Linear first{nullptr};
  torch::Tensor again, bias;
};
TORCH_MODULE(Tied);

// A tied weight is in the wrapper's lists once: an optimizer of the list steps it once.
THREAD_RANK_TEST(BackwardModesTest, ATiedParameterIsListedOnce, 1, 2) {
  Tied net;
  Randomize(*net, 7);
  DistributedDataParallel model(net, group);
  EXPECT_EQ(net->parameters().size(), 4u) << "LibTorch's own list has it twice";
  EXPECT_THAT(model->named_parameters().keys(),
              ::testing::ElementsAre("again", "bias", "first.bias"));
  ASSERT_EQ(model->parameters().size(), 3u);
  EXPECT_TRUE(model->parameters()[0].is_same(net->first->weight));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  model.forward(Input(group->rank(), 0)).backward();
  const at::Tensor expected = (net->first->weight - 0.1 * net->first->weight.grad()).detach();
  optimizer.step();
  EXPECT_TRUE(torch::allclose(net->first->weight, expected));
}

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    words = register_module("words",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
    last = register_module("last", torch::nn::Linear(3, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last->forward(words->forward(x)).pow(2).sum();
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Words);

RANK_TEST(BackwardModesTest, SparseGradientsStaySparse, .world_size = 2,
          .not_on_device = "sparse gradients are refused, as with NCCL") {
  const auto group = init_process_group();
  const auto input = [](int rank, int step) {
    return torch::tensor({rank, 2 * rank + 1, (step + rank) % 10}, torch::kLong);
  };
  for (const bool find_unused : {false, true}) {
    torch::manual_seed(3);
    Words net;
    DistributedDataParallel model(net, group, {.find_unused_parameters = find_unused});
    for (int step = 0; step < 3; ++step) {
      torch::manual_seed(3);
      Words alone;
      for (int rank = 0; rank < group->size(); ++rank) {
        (alone->forward(input(rank, step)) / group->size()).backward();
      }
      net->zero_grad();
      model.forward(input(group->rank(), step)).backward();
      const torch::Tensor gradient = net->words->weight.grad();
      EXPECT_TRUE(gradient.is_sparse());
      EXPECT_TRUE(torch::allclose(gradient.to_dense(), alone->words->weight.grad().to_dense()));
      EXPECT_TRUE(torch::allclose(net->last->weight.grad(), alone->last->weight.grad(), 1e-5));
      EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    }
  }
}

THREAD_RANK_TEST(BackwardModesTest, GradientsOfGradients, 2) {
  const auto penalized = [](const torch::Tensor& x,
                            const std::function<torch::Tensor(const torch::Tensor&)>& forward) {
    const torch::Tensor input = x.clone().requires_grad_();
    const torch::Tensor output = forward(input).pow(2).sum();
    // autograd::grad() does not average and begins no reduction.
    const torch::Tensor slope = torch::autograd::grad({output}, {input}, {}, /*retain_graph=*/true,
                                                      /*create_graph=*/true)[0];
    return output + slope.pow(2).sum();
  };
  torch::nn::Linear net(3, 2);
  Randomize(*net, 4);
  DistributedDataParallel<torch::nn::LinearImpl> model(net, group);
  for (int step = 0; step < 2; ++step) {
    torch::nn::Linear alone(3, 2);
    Randomize(*alone, 4);
    for (int rank = 0; rank < group->size(); ++rank) {
      (penalized(Input(rank, step), [&](const torch::Tensor& x) { return alone->forward(x); }) /
       group->size())
          .backward();
    }
    net->zero_grad();
    penalized(Input(group->rank(), step), [&](const torch::Tensor& x) {
      return model.forward(x);
    }).backward();
    EXPECT_TRUE(torch::allclose(net->weight.grad(), alone->weight.grad(), 1e-4));
  }
  // create_graph: gradients are averaged, and detached from the graph.
  net->zero_grad();
  model.forward(Input(group->rank(), 5)).pow(2).sum().backward({}, true, /*create_graph=*/true);
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  EXPECT_FALSE(net->weight.grad().requires_grad());
}

// ---- Options.

THREAD_RANK_TEST(BackwardModesTest, OptionsOfBuckets, 2) {
  const auto use = [](int) { return std::pair(true, true); };
  std::optional<torch::Tensor> reference;
  for (const DistributedDataParallelOptions& options : std::vector<DistributedDataParallelOptions>{
           {.find_unused_parameters = true},
           {.bucket_cap_mb_list = {1e-5, 2e-5}, .find_unused_parameters = true},
           {.batched_grad_copy = true, .find_unused_parameters = true},
           {.lazy_bucket_allocation = true, .find_unused_parameters = true},
           {.gradient_as_bucket_view = true, .batched_grad_copy = true, .static_graph = true},
           {.lazy_bucket_allocation = true, .static_graph = true}}) {
    Heads net;
    Randomize(*net, 9);
    DistributedDataParallel model(net, group, options);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto expected = Expected(net, group->size(), step, use);
      Sum(model.forward(Input(group->rank(), step), true, true)).backward();
      ExpectGradients(*net, expected);
    }
    if (!reference.has_value()) reference = Gradients(*net);
    EXPECT_TRUE(torch::equal(*reference, Gradients(*net)));
  }
  const auto refused = [&](const DistributedDataParallelOptions& options) {
    Heads net;
    return ErrorOf<ConfigurationError>([&] { DistributedDataParallel model(net, group, options); });
  };
  EXPECT_THAT(refused({.device_ids = {0, 1}}), HasSubstr("device_ids holds more than one device"));
  EXPECT_THAT(refused({.device_ids = {7}}),
              HasSubstr("parameter trunk.weight is on " + group->device().str()));
  EXPECT_THAT(refused({.output_device = 0}), HasSubstr("output_device is set without device_ids"));
  EXPECT_THAT(refused({.bucket_cap_mb = 1, .bucket_cap_mb_list = {1}}),
              HasSubstr("bucket_cap_mb_list"));
  EXPECT_THAT(refused({.gradient_as_bucket_view = true, .lazy_bucket_allocation = true}),
              HasSubstr("lazy_bucket_allocation"));
  EXPECT_THAT(refused({.skip_all_reduce_unused_params = true}),
              HasSubstr("needs find_unused_parameters or static_graph"));
  EXPECT_THAT(refused({.param_to_hook_all_reduce = torch::ones({1})}), HasSubstr("set both"));
  EXPECT_THAT(refused({.params_and_buffers_to_ignore = {"nothing"}}),
              HasSubstr("names nothing, which the module does not have"));
  Heads meta;
  meta->trunk->weight = meta->trunk->register_parameter(
      "elsewhere", torch::empty({4, 3}, torch::TensorOptions().device(torch::kMeta)));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { DistributedDataParallel model(meta, group); }),
              HasSubstr("on several types of devices"));
}

THREAD_RANK_TEST(BackwardModesTest, IgnoredAndDelayedParameters, 2) {
  const auto use = [](int) { return std::pair(true, true); };
  {
    Heads net;
    Randomize(*net, group->rank());
    DistributedDataParallel model(net, group,
                                  {.params_and_buffers_to_ignore = {"left.weight", "left.bias",
                                                                    "spare.weight", "spare.bias"}});
    EXPECT_FALSE(SameOnAllRanks(*group, net->left->weight));  // also not copied
    EXPECT_TRUE(SameOnAllRanks(*group, net->right->weight));
    Sum(model.forward(Input(group->rank(), 0), true, true)).backward();
    EXPECT_FALSE(SameOnAllRanks(*group, net->left->weight.grad()));
    EXPECT_TRUE(SameOnAllRanks(*group, net->right->weight.grad()));
  }
  Heads net;
  net->spare->weight.set_requires_grad(false);
  net->spare->bias.set_requires_grad(false);
  // The gradients of the trunk come after those of the heads.
  DistributedDataParallel model(
      net, group,
      {.delay_all_reduce_named_params = {{"left.weight", net->left->weight},
                                         {"left.bias", net->left->bias}},
       .param_to_hook_all_reduce = net->trunk->weight});
  for (const auto& bucket : model.bucket_layout()) {
    EXPECT_THAT(bucket, Not(::testing::Contains("left.weight")));
  }
  for (int step = 0; step < 3; ++step) {
    if (step != 1) net->zero_grad();
    for (auto* layer : {&net->trunk, &net->right}) (*layer)->zero_grad();
    const auto expected = Expected(net, group->size(), step, use);
    Sum(model.forward(Input(group->rank(), step), true, true)).backward();
    ExpectGradients(*net, expected);
  }
}

// The same with trunk and head swapped: the gradients of the trunk come after the one that starts
// their average.
THREAD_RANK_TEST(BackwardModesTest, DelayedGradientAfterTheTriggerIsRefused, 2) {
  Heads net;
  net->spare->weight.set_requires_grad(false);
  net->spare->bias.set_requires_grad(false);
  const DistributedDataParallelOptions options{
      .delay_all_reduce_named_params = {{"trunk.weight", net->trunk->weight},
                                        {"trunk.bias", net->trunk->bias}},
      .param_to_hook_all_reduce = net->left->weight};
  DistributedDataParallel model(net, group, options);
  EXPECT_THAT(ErrorOf<c10::Error>(
                  [&] { Sum(model.forward(Input(group->rank(), 0), true, true)).backward(); }),
              AllOf(HasSubstr("the gradient of trunk."),
                    HasSubstr("choose a parameter whose gradient comes last")));
}

THREAD_RANK_TEST(BackwardModesTest, StateWithoutInitialCopy, 2) {
  Heads net;
  Randomize(*net, group->rank());
  DistributedDataParallel model(net, group, {.init_sync = false, .find_unused_parameters = true});
  EXPECT_FALSE(SameOnAllRanks(*group, Flatten(net->parameters())));
}

// ---- Reports.

RANK_TEST(BackwardModesTest, DescribesItself, 2) {
  const auto group = init_process_group();
  Heads net;
  net->spare->weight.set_requires_grad(false);
  net->spare->bias.set_requires_grad(false);
  DistributedDataParallel model(net, group, {.bucket_cap_mb = 1e-4});
  EXPECT_THAT(model.describe(), AllOf(HasSubstr("6 parameters"), HasSubstr("as first dealt"),
                                      HasSubstr("right.bias")));
  for (int step = 0; step < 3; ++step) {
    Sum(model.forward(Input(group->rank(), step), true, true)).backward();
  }
  EXPECT_THAT(model.describe(), HasSubstr("in the order in which gradients come"));
  const DDPLoggingData data = model.logging_data();
  EXPECT_EQ(data.world_size, group->size());
  EXPECT_EQ(data.rank, group->rank());
  EXPECT_EQ(data.iteration, 3);
  EXPECT_EQ(data.num_parameter_tensors, 6);
  EXPECT_EQ(data.total_parameter_size_bytes, 4 * (12 + 4 + 8 + 2 + 8 + 2));
  EXPECT_TRUE(data.has_rebuilt_buckets);
  EXPECT_GT(data.forward_compute_time, 0);
  EXPECT_GT(data.backward_comm_time, 0);
  EXPECT_GE(data.overlap_ratio, 0);
  EXPECT_THAT(data.prev_iteration_grad_ready_order_indices, HasSubstr(", "));
  EXPECT_THAT(data.to_json(), HasSubstr("\"rebuilt_bucket_sizes\""));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { model.set_logging_sample_rate(0); }),
              HasSubstr("0"));
  // LibTorch's usage logger of the program gets the tenth timed iteration.
  std::vector<c10::DDPLoggingData> told;
  c10::SetPyTorchDDPUsageLogger([&](const c10::DDPLoggingData& usage) { told.push_back(usage); });
  for (int step = 3; step < 12; ++step) {
    Sum(model.forward(Input(group->rank(), step), true, true)).backward();
  }
  EXPECT_EQ(told.size(), 1u);
  if (told.size() == 1) {
    EXPECT_EQ(told[0].ints_map.at("world_size"), group->size());
    EXPECT_EQ(told[0].strs_map.at("backend_name"), group->backend());
  }
}

RANK_TEST(BackwardModesTest, TakesADeviceMesh, 2) {
  const auto group = init_process_group();
  const auto use = [](int) { return std::pair(true, true); };
  const std::string type = c10::DeviceTypeName(group->device().type(), /*lower_case=*/true);
  const auto mesh = init_device_mesh(group, type, {group->size()}, {"replicate"});
  Heads net;
  DistributedDataParallel model(
      net, DistributedDataParallelOptions{.device_mesh = mesh, .find_unused_parameters = true});
  const auto expected = Expected(net, group->size(), 0, use);
  Sum(model.forward(Input(group->rank(), 0), true, true)).backward();
  ExpectGradients(*net, expected);
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { DistributedDataParallel both(net, group, {.device_mesh = mesh}); }),
              HasSubstr("process_group and device_mesh are both set"));
  const auto grid = init_device_mesh(group, type, {1, group->size()}, {"shard", "replicate"});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                DistributedDataParallel flat(net,
                                             DistributedDataParallelOptions{.device_mesh = grid});
              }),
              HasSubstr("device_mesh has 2 dimensions"));
}

THREAD_RANK_TEST(BackwardModesTest, MovesToAnotherGroup, 2, 3) {
  const auto use = [](int) { return std::pair(true, true); };
  Heads net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  // The hook's state is the group, and is replaced with it.
  model.register_comm_hook(group, allreduce_hook);
  Heads other;
  DistributedDataParallel hooked(other, group, {.find_unused_parameters = true});
  hooked.register_comm_hook(
      0, [group](int&, GradBucket& bucket) { return allreduce_hook(group, bucket); }, "of my own");
  Sum(model.forward(Input(group->rank(), 0), true, true)).backward();
  const auto smaller = group->new_group({0, 1});
  if (!smaller) return;
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { hooked.update_process_group(smaller); }),
              AllOf(HasSubstr("the comm hook \"of my own\""), HasSubstr("init_sync=false")));
  model.update_process_group(smaller);
  for (int step = 1; step < 4; ++step) {
    net->zero_grad();
    const auto expected = Expected(net, 2, step, use);
    Sum(model.forward(Input(group->rank(), step), true, true)).backward();
    ExpectGradients(*net, expected);
    EXPECT_TRUE(SameOnAllRanks(*smaller, Gradients(*net)));
  }
}

}  // namespace
}  // namespace ddp
