// Tests backwards over several workers, and the reduction of wrapped models in them. Workers are
// processes; trainers have a process group of their own, on Gloo.
//
// Length: one case for each mode and each user of such a backward, on the same two modules.
#include "ddp/rpc/autograd_context.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "ddp/activation_checkpoint.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/mixed_precision.h"
#include "ddp/nn/sync_batch_norm.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "ddp/rpc/rpc.h"
#include "ddp/rpc/test_context_job.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::rpc {
namespace {

NOT_ON_DEVICE("RPC carries tensors of the CPU only");

using ::ddp::rpc::testing::ExpectEqual;
using ::ddp::rpc::testing::Ids;
using ::ddp::rpc::testing::Job;
using ::ddp::rpc::testing::kRate;
using ::ddp::rpc::testing::MixOn;
using ::ddp::rpc::testing::Net;
using ::ddp::rpc::testing::Shard;
using ::ddp::rpc::testing::UsesSpare;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Has no gradient in the backward.
struct Vanish : torch::autograd::Function<Vanish> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

// A layer whose weight has no gradient where `vanish` is set.
struct VanishingImpl : torch::nn::Module {
  VanishingImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 3));
    Randomize(*this, 11);
  }
  at::Tensor forward(const at::Tensor& x, bool vanish) {
    const at::Tensor weight = vanish ? Vanish::apply(layer->weight) : layer->weight;
    return torch::linear(x, weight, layer->bias);
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Vanishing);

// The training in one process: gradients of the trainers are halved and added, as the reducer does;
// the server's parameters take the steps of one trainer after the other.
struct Reference {
  explicit Reference(bool sparse) : shard(sparse) {}
  Shard shard;
  Net net{[this](const at::Tensor& x) { return shard.Mix(x); }};

  void Step(int step, bool with_spare) {
    const size_t dense = net->parameters().size();
    std::vector<at::Tensor> all = net->parameters();
    for (const at::Tensor& parameter : shard.parameters()) all.push_back(parameter);
    std::vector<std::vector<at::Tensor>> gradients;
    for (int rank = 0; rank < 2; ++rank) {
      const bool use = with_spare && UsesSpare(rank, step);
      const at::Tensor loss = net->forward(shard.Lookup(Ids(rank, step)), use).pow(2).mean();
      gradients.push_back(torch::autograd::grad({loss}, all, {}, false, false,
                                                /*allow_unused=*/true));
    }
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < all.size(); ++i) {
      const at::Tensor a = gradients[0][i];
      const at::Tensor b = gradients[1][i];
      if (i >= dense) {
        all[i].add_(a, -kRate).add_(b, -kRate);
      } else if (a.defined() || b.defined()) {
        const at::Tensor zero = torch::zeros_like(all[i]);
        all[i].sub_((a.defined() ? a * 0.5 : zero) + (b.defined() ? b * 0.5 : zero), kRate);
      }
    }
  }
};

// ---- Wrapped models.

struct Mode {
  DistributedDataParallelOptions options;
  bool with_spare = false;
  bool sparse = false;
  bool hook = false;
};

void TrainAsInOneProcess(Job& job, const Mode& mode) {
  ProcessGroup& group = *job.trainers;
  const RRef<Shard> shard = job.MakeShard(mode.sparse);
  Net net(MixOn(shard));
  DistributedDataParallel model(net, job.trainers, mode.options);
  if (mode.hook) model.register_comm_hook(job.trainers, allreduce_hook);
  DistributedOptimizer optimizer(sgd(kRate), {shard}, net->parameters());
  Reference reference(mode.sparse);
  for (int step = 0; step < 6; ++step) {
    AutogradContext context;
    const at::Tensor rows = shard.sync<at::Tensor>("lookup", Ids(group.rank(), step));
    const bool use = mode.with_spare && UsesSpare(group.rank(), step);
    context.backward(model.forward(rows, use).pow(2).mean());
    for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == group.rank()) optimizer.step(context);
      group.barrier();
    }
    reference.Step(step, mode.with_spare);
    const auto expected = reference.net->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(torch::equal(item.value(), expected[item.key()]))
          << item.key() << " in step " << step;
    }
    const auto values = shard.sync<std::vector<at::Tensor>>("values");
    EXPECT_TRUE(torch::equal(values[0], reference.shard.table)) << step;
    EXPECT_TRUE(torch::equal(values[1], reference.shard.weight)) << step;
    group.barrier();
  }
}

RANK_TEST(AutogradContextTest, WrappedModelsTrainAsInOneProcess, 3) {
  Job job;
  if (job.trainers) {
    const double tiny = 1e-5;
    const std::vector<Mode> modes = {
        {{.params_and_buffers_to_ignore = {"spare.weight", "spare.bias"}}},
        {{.find_unused_parameters = true}, true},
        {{.bucket_cap_mb = tiny, .find_unused_parameters = true}, true, /*sparse=*/true},
        {{.bucket_cap_mb = tiny, .gradient_as_bucket_view = true, .find_unused_parameters = true},
         true},
        {{.bucket_cap_mb = tiny,
          .gradient_as_bucket_view = true,
          .find_unused_parameters = true,
          .skip_all_reduce_unused_params = true},
         true},
        {{.bucket_cap_mb = tiny, .lazy_bucket_allocation = true, .find_unused_parameters = true},
         true},
        {{.bucket_cap_mb = tiny, .find_unused_parameters = true}, true, false, /*hook=*/true},
        {{.bucket_cap_mb = tiny, .batched_grad_copy = true, .find_unused_parameters = true}, true},
        {{.bucket_cap_mb = tiny, .static_graph = true}},
        {{.bucket_cap_mb = tiny, .gradient_as_bucket_view = true, .static_graph = true}},
    };
    for (size_t i = 0; i < modes.size(); ++i) {
      SCOPED_TRACE(i);
      TrainAsInOneProcess(job, modes[i]);
    }
  }
  job.workers->shutdown();
}

// LibTorch has one thread here for all that the trainers do for each other. A thread that waited
// for the other trainer's gradients would never serve that trainer's graph.
RANK_TEST(AutogradContextTest, OneThreadIsEnough, 2) {
  at::set_num_interop_threads(1);
  Registry registry;
  const at::Tensor weight = RandomNumbers(5, {4, 4}).requires_grad_();
  registry.function("serve", [weight](at::Tensor x) { return torch::matmul(x, weight); });
  Job job(std::move(registry));
  const std::string peer = "worker" + std::to_string(1 - job.rank());
  Net net([&](const at::Tensor& x) { return sync<at::Tensor>(peer, "serve", x); });
  DistributedDataParallel model(net, job.trainers,
                                {.bucket_cap_mb = 1e-5, .find_unused_parameters = true});
  for (int step = 0; step < 8; ++step) {
    AutogradContext context;
    context.backward(model.forward(RandomNumbers(step, {2, 4}), true).sum());
    EXPECT_TRUE(context.grad(net->first->weight).defined());
    EXPECT_TRUE(context.grad(net->spare->weight).defined());
  }
  job.workers->shutdown();
}

// Autograd calls the hooks of a parameter also for an undefined gradient.
RANK_TEST(AutogradContextTest, AnUndefinedGradientIsAsInAPlainBackward, 3) {
  Job job;
  if (job.trainers) {
    for (const DistributedDataParallelOptions& options :
         {DistributedDataParallelOptions{},
          DistributedDataParallelOptions{.find_unused_parameters = true},
          DistributedDataParallelOptions{.gradient_as_bucket_view = true}}) {
      Vanishing plain;
      Vanishing contextual;
      DistributedDataParallel plain_model(plain, job.trainers, options);
      DistributedDataParallel model(contextual, job.trainers, options);
      for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE(step);
        const bool vanish = step == 2 || step % 2 == job.rank();
        const at::Tensor x = RandomNumbers(10 * job.rank() + step, {2, 4});
        for (at::Tensor& parameter : plain->parameters()) parameter.mutable_grad() = at::Tensor();
        plain_model.forward(x + 1, vanish).pow(2).sum().backward();
        AutogradContext context;
        const at::Tensor y = sync<at::Tensor>("worker2", "plus_one", x);
        context.backward(model.forward(y, vanish).pow(2).sum());
        for (size_t i = 0; i < plain->parameters().size(); ++i) {
          const at::Tensor expected = plain->parameters()[i].grad();
          const at::Tensor gradient = context.grad(contextual->parameters()[i]);
          ASSERT_EQ(gradient.defined(), expected.defined()) << i;
          EXPECT_TRUE(!expected.defined() || torch::equal(gradient, expected)) << i;
        }
      }
    }
  }
  job.workers->shutdown();
}

// ---- Contexts without a wrapped model.

RANK_TEST(AutogradContextTest, GradientsAreThoseOfOneProcess, 3) {
  Job job;
  if (job.rank() == 0) {
    const RRef<Shard> shard = remote<Shard>("worker2", false);
    const at::Tensor x = RandomNumbers(3, {2, 4}).requires_grad_();
    const at::Tensor unused = torch::ones({1}).requires_grad_();
    const Shard local(false);
    const at::Tensor loss = (local.Mix(x * 2) * local.Lookup(Ids(0, 0)).sum()).sum();
    const std::vector<at::Tensor> expected = torch::autograd::grad({loss}, {x});
    {
      AutogradContext context;
      Future<at::Tensor> mixed = shard.async<at::Tensor>("mix", x * 2);
      Future<at::Tensor> rows = shard.async<at::Tensor>("lookup", Ids(0, 0));
      const at::Tensor total = (mixed.wait() * rows.wait().sum()).sum();
      EXPECT_TRUE(torch::equal(total, loss));
      context.backward(total, /*retain_graph=*/true);
      EXPECT_TRUE(torch::equal(context.grad(x), expected[0]));
      EXPECT_FALSE(x.grad().defined());
      EXPECT_FALSE(context.grad(unused).defined());
      context.backward(total);  // adds
      EXPECT_TRUE(torch::equal(context.grad(x), expected[0] * 2));
      EXPECT_EQ(sync<int>("worker2", "contexts"), 1);
    }
    // The message of a context's end is not awaited.
    while (sync<int>("worker2", "contexts") > 0) continue;
    EXPECT_THROW(AutogradContext().backward(torch::ones({})), ConfigurationError);
    EXPECT_THROW(AutogradContext().backward(torch::ones({}).requires_grad_()), ConfigurationError);
  }
  job.workers->shutdown();
}

// The way back to the argument leads through other workers alone.
RANK_TEST(AutogradContextTest, AFunctionMayPassItsArgumentOn, 3) {
  Registry registry;
  registry.function("relay", [](at::Tensor x) {
    const at::Tensor y = sync<at::Tensor>("worker2", "plus_one", x);
    return sync<at::Tensor>("worker2", "plus_one", y);
  });
  Job job(std::move(registry));
  if (job.rank() == 0) {
    const at::Tensor x = torch::ones({2}).requires_grad_();
    AutogradContext context;
    context.backward(sync<at::Tensor>("worker1", "relay", x * 3).sum());
    EXPECT_TRUE(torch::equal(context.grad(x), torch::full({2}, 3.0)));
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, CheckpointsThatAreNotReentrantWork, 3) {
  Job job;
  if (job.rank() == 0) {
    const at::Tensor x = RandomNumbers(3, {2, 4}).requires_grad_();
    const auto segment = [](const at::Tensor& t) { return torch::tanh(t) * t; };
    const at::Tensor expected = torch::autograd::grad({segment(x + 1).sum()}, {x})[0];
    for (const bool reentrant : {false, true}) {
      AutogradContext context;
      const at::Tensor y = sync<at::Tensor>("worker2", "plus_one", x);
      const at::Tensor z = checkpoint({.use_reentrant = reentrant}, segment, y);
      const auto backward = [&] { context.backward(z.sum()); };
      if (reentrant) {
        EXPECT_THAT(ErrorOf<RemoteError>(backward),
                    AllOf(HasSubstr("worker0"), HasSubstr("a reentrant checkpoint works in")));
      } else {
        backward();
        EXPECT_TRUE(torch::equal(context.grad(x), expected));
      }
    }
  }
  job.workers->shutdown();
}

// The message of a context's end is lost once, and sent again.
RANK_TEST(AutogradContextTest, ALostEndOfAContextIsRepeated, 3) {
  Job job({}, {.lost = {"CLEANUP_AUTOGRAD_CONTEXT_REQ"}, .losses = 1});
  if (job.rank() == 0) {
    {
      AutogradContext context;
      context.backward(
          sync<at::Tensor>("worker2", "plus_one", torch::ones({2}).requires_grad_()).sum());
    }
    while (sync<int>("worker2", "contexts") > 0) continue;
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AGradientThatNeverComesIsAnErrorAtOnce, 3) {
  Registry registry;
  registry.function("forgetful", [](at::Tensor x) {
    sync<at::Tensor>("worker1", "plus_one", x);
    return x * 2;
  });
  const at::Tensor weight = torch::ones({2}).requires_grad_();
  registry.function("ignores", [weight](at::Tensor x) { return weight * 2; });
  registry.function("leaf", [weight](at::Tensor x) { return weight; });
  registry.function("relay",
                    [](at::Tensor x) { return x + sync<at::Tensor>("worker1", "ignores", x); });
  Job job(std::move(registry));
  if (job.rank() == 0) {
    const at::Tensor x = torch::ones({2}).requires_grad_();
    const auto problem = [&](const std::function<at::Tensor()>& forward) {
      AutogradContext context;
      const at::Tensor loss = forward().sum();
      return ErrorOf<ConfigurationError>([&] { context.backward(loss); });
    };
    const auto plus_one = [](const at::Tensor& t) {
      return async<at::Tensor>("worker2", "plus_one", t);
    };
    EXPECT_THAT(problem([&] {
                  plus_one(x).wait();
                  return x * 2;
                }),
                HasSubstr("the loss does not depend on the answer of plus_one on worker worker2"));
    EXPECT_THAT(problem([&] {
                  plus_one(x);
                  return x * 2;
                }),
                HasSubstr("the answer of plus_one on worker worker2 was not taken"));
    EXPECT_THAT(problem([&] { return x * sync<int64_t>("worker2", "count", x); }),
                HasSubstr("the call of count on worker worker2 sent a tensor"));
    EXPECT_THAT(problem([&] {
                  EXPECT_THROW(sync<at::Tensor>("worker2", "fail"), RemoteError);
                  return plus_one(x).wait();
                }),
                AllOf(HasSubstr("the call of fail on worker worker2 failed in this context"),
                      HasSubstr("no answer")));
    EXPECT_THAT(problem([&] { return x.detach(); }), HasSubstr("scalars that require gradients"));
    EXPECT_THAT(problem([&] {
                  EXPECT_THAT(ErrorOf<ConfigurationError>([] { AutogradContext another; }),
                              HasSubstr("open rpc::AutogradContext"));
                  return plus_one(x).wait();
                }),
                "no error");
    // Allowed: no gradient, or no argument that needs one.
    EXPECT_EQ(problem([&] {
                sync<int64_t>("worker2", "count", x.detach());
                const torch::NoGradGuard no_grad;
                EXPECT_FALSE(plus_one(x).wait().requires_grad());
                const at::AutoGradMode with_gradients(true);
                return plus_one(x).wait();
              }),
              "no error");
    // The answer's gradient leads to the callee's own parameter alone.
    EXPECT_EQ(problem([&] { return sync<at::Tensor>("worker2", "ignores", x.detach()); }),
              "no error");
    AutogradContext context;
    for (const char* function : {"ignores", "leaf", "relay"}) {
      EXPECT_THAT(ErrorOf<RemoteError>([&] { sync<at::Tensor>("worker2", function, x); }),
                  AllOf(HasSubstr(function), HasSubstr("does not depend on the argument that")));
    }
    EXPECT_THAT(ErrorOf<RemoteError>([&] { sync<at::Tensor>("worker2", "forgetful", x); }),
                AllOf(HasSubstr("within forgetful"), HasSubstr("plus_one on worker worker1")));
  }
  job.workers->shutdown();
}

// ---- Modes that a context does not support.

RANK_TEST(AutogradContextTest, UnsupportedModesAreRefusedByName, 3) {
  Net served([](const at::Tensor& x) { return x; });
  std::unique_ptr<DistributedDataParallel<Net>> served_model;
  Registry registry;
  registry.function("served", [&](at::Tensor x) { return served_model->forward(x, false); });
  Job job(std::move(registry));
  if (job.trainers) {
    const auto error = [&](const DistributedDataParallelOptions& options, bool join, bool delayed) {
      Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
      DistributedDataParallelOptions complete = options;
      complete.find_unused_parameters = true;
      // A group of its own, because the refusal is a failure of the step on all ranks.
      const std::shared_ptr<ProcessGroup> group = job.world->new_group({0, 1});
      if (delayed) {
        complete.delay_all_reduce_named_params = {{"second.weight", net->second->weight}};
        complete.param_to_hook_all_reduce = net->first->weight;
      }
      DistributedDataParallel model(net, group, complete);
      std::optional<Join> joined;
      if (join) joined.emplace(std::vector<JoinableRef>{&model});
      return ErrorOf<ConfigurationError>([&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).to(at::kFloat).sum());
      });
    };
    EXPECT_THAT(
        error({.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}, false, false),
        HasSubstr("mixed_precision with a param_dtype is not supported in a distributed"));
    {
      Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
      DistributedDataParallel model(net, job.world->new_group({0, 1}),
                                    {.find_unused_parameters = true});
      const auto train = [&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).sum());
      };
      {
        const auto guard = model.no_sync();
        EXPECT_THAT(ErrorOf<ConfigurationError>(train),
                    HasSubstr("no_sync is not supported in a distributed autograd context"));
      }
      EXPECT_EQ(ErrorOf<ConfigurationError>(train), "no error");
    }
    EXPECT_THAT(error({}, false, true),
                HasSubstr("delay_all_reduce_named_params is not supported in a distributed"));
    // A backward of the other trainer through this trainer's wrapped model.
    served_model =
        std::make_unique<DistributedDataParallel<Net>>(served, job.world->new_group({0, 1}));
    job.trainers->barrier();
    if (job.rank() == 0) {
      AutogradContext context;
      const at::Tensor y = sync<at::Tensor>("worker1", "served", torch::ones({2, 4}));
      EXPECT_THAT(ErrorOf<RemoteError>([&] { context.backward(y.sum()); }),
                  HasSubstr("a backward that another worker has started reaches a parameter"));
    }
    job.trainers->barrier();
    EXPECT_THAT(error({}, true, false), HasSubstr("a Join is not supported in a distributed"));
  }
  job.workers->shutdown();
}

struct NormalizedNetImpl : torch::nn::Module {
  NormalizedNetImpl() {
    register_module("first", first);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm->forward(sync<at::Tensor>("worker2", "plus_one", first->forward(x)));
  }
  torch::nn::Linear first{4, 4};
  SyncBatchNorm1d norm{torch::nn::BatchNormOptions(4)};
};
TORCH_MODULE(NormalizedNet);

// Its sums would run on threads that must not wait.
RANK_TEST(AutogradContextTest, ASyncBatchNormIsRefusedByName, 3) {
  Job job;
  if (job.trainers) {
    DistributedDataParallel<NormalizedNet> model(NormalizedNet(), job.trainers);
    const at::Tensor x = RandomNumbers(job.rank(), {3, 4});
    EXPECT_THAT(ErrorOf<std::exception>([&] {
                  AutogradContext context;
                  context.backward(model(x).pow(3).sum());
                }),
                HasSubstr("SyncBatchNorm is not supported in a distributed autograd context"));
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AZeroRedundancyOptimizerIsToldOfTheContext, 3) {
  Job job;
  if (job.trainers) {
    const auto error = [&](bool scatter) {
      Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
      DistributedDataParallel model(net, job.world->new_group({0, 1}),
                                    {.find_unused_parameters = true});
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(
          model, torch::optim::SGDOptions(kRate),
          ZeroRedundancyOptions{.scatter_gradients = scatter});
      return ErrorOf<ConfigurationError>([&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).sum());
        const at::Tensor before = net->first->weight.detach().clone();
        EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.step(); }),
                    HasSubstr("copy context.grad(parameter) into .grad before step()"));
        EXPECT_TRUE(torch::equal(net->first->weight, before));
        for (const at::Tensor& parameter : net->parameters()) {
          parameter.mutable_grad() = context.grad(parameter);
        }
        zero.step();
        EXPECT_TRUE(
            torch::equal(net->first->weight, before.add(context.grad(net->first->weight), -kRate)));
        // The context is no news any more.
        zero.zero_grad();
        zero.step();
      });
    };
    EXPECT_EQ(error(false), "no error");
    EXPECT_THAT(error(true), HasSubstr("scatter_gradients of a ZeroRedundancyOptimizer is not "
                                       "supported in a distributed autograd context"));
  }
  job.workers->shutdown();
}

// ---- Optimizers.

RANK_TEST(AutogradContextTest, TrainersShareAnObjectsOptimizer, 3) {
  Job job;
  if (job.trainers) {
    const RRef<Shard> shard = job.MakeShard();
    Shard expected(false);
    torch::optim::Adagrad reference(expected.parameters(), torch::optim::AdagradOptions(0.1));
    DistributedOptimizer optimizer(adagrad(0.1), {shard});
    for (int step = 0; step < 6; ++step) {
      const at::Tensor ids = Ids(0, step);
      if (step % 2 == job.rank()) {
        AutogradContext context;
        context.backward(shard.sync<at::Tensor>("lookup", ids).pow(2).sum());
        optimizer.step(context);
      }
      job.trainers->barrier();
      reference.zero_grad();
      expected.Lookup(ids).pow(2).sum().backward();
      reference.step();
      const auto values = shard.sync<std::vector<at::Tensor>>("values");
      EXPECT_TRUE(torch::equal(values[0], expected.table)) << "in step " << step;
      EXPECT_TRUE(torch::equal(values[1], expected.weight)) << "in step " << step;
      job.trainers->barrier();
    }
    AutogradContext context;
    shard.sync<at::Tensor>("lookup", Ids(0, 0));
    EXPECT_THAT(ErrorOf<RemoteError>([&] { DistributedOptimizer(sgd(1), {shard}).step(context); }),
                HasSubstr("has an optimizer \"adagrad\" with other options"));
    EXPECT_THROW(DistributedOptimizer({.name = "none", .options = {}}, {shard}),
                 ConfigurationError);
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, TheLearningRateOfAnOptimizerChanges, 3) {
  Job job;
  if (job.rank() == 0) {
    const RRef<Shard> shard = remote<Shard>("worker2", false);
    const Shard local(false);
    Shard expected(false);
    torch::optim::Adam reference(expected.parameters(), torch::optim::AdamOptions(0.1));
    DistributedOptimizer optimizer(adam(0.1), {shard}, local.parameters());
    EXPECT_EQ(optimizer.learning_rate(), 0.1);
    for (const double rate : {0.1, 0.025, 0.0, 0.5}) {
      optimizer.set_learning_rate(rate);
      reference.param_groups()[0].options().set_lr(rate);
      AutogradContext context;
      const at::Tensor ids = Ids(0, 1);
      context.backward((shard.sync<at::Tensor>("lookup", ids) + local.Lookup(ids)).pow(2).sum());
      optimizer.step(context);
      reference.zero_grad();
      (expected.Lookup(ids) + expected.Lookup(ids).detach()).pow(2).sum().backward();
      reference.step();
      const auto remote = shard.sync<std::vector<at::Tensor>>("values");
      EXPECT_TRUE(torch::equal(remote[0], expected.table)) << "with rate " << rate;
      EXPECT_TRUE(torch::equal(local.table, expected.table)) << "with rate " << rate;
    }
    EXPECT_THROW(optimizer.set_learning_rate(-1), ConfigurationError);
    EXPECT_EQ(optimizer.learning_rate(), 0.5);
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, TheOptimizerOfAnObjectDiesWithIt, 3) {
  Job job;
  if (job.rank() == 0) {
    {
      const RRef<Shard> shard = remote<Shard>("worker2", false);
      DistributedOptimizer optimizer(adagrad(0.1), {shard});
      AutogradContext context;
      context.backward(shard.sync<at::Tensor>("lookup", Ids(0, 0)).sum());
      optimizer.step(context);
      EXPECT_TRUE(sync<bool>("worker2", "table_alive"));
    }
    // The messages of both ends are not awaited.
    while (sync<bool>("worker2", "table_alive")) continue;
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AStepThatThrowsLeavesNoGradient, 3) {
  Job job;
  if (job.rank() == 0) {
    const Shard shard(/*sparse=*/true);
    DistributedOptimizer optimizer(adam(0.1), {}, shard.parameters());
    AutogradContext context;
    context.backward(sync<at::Tensor>("worker2", "plus_one", shard.Lookup(Ids(0, 0))).sum());
    EXPECT_THAT(ErrorOf<std::exception>([&] { optimizer.step(context); }), HasSubstr("sparse"));
    EXPECT_FALSE(shard.table.grad().defined());
  }
  job.workers->shutdown();
}

// A shard on the server and one here, updated from the same contexts. The first three steps give
// the weights no gradient.
struct Updated {
  explicit Updated(const OptimizerSpec& spec) : optimizer(spec, {remote}, local.parameters()) {}

  template <typename Lookup, typename Mix>
  static at::Tensor Loss(int step, const Lookup& lookup, const Mix& mix) {
    const at::Tensor rows = lookup(Ids(0, step));
    return (step < 3 ? rows : mix(rows)).pow(2).sum();
  }
  static at::Tensor Loss(int step, const Shard& shard) {
    return Loss(
        step, [&](const at::Tensor& ids) { return shard.Lookup(ids); },
        [&](const at::Tensor& x) { return shard.Mix(x); });
  }
  void Step(int step) {
    AutogradContext context;
    const at::Tensor far = Loss(
        step, [&](const at::Tensor& ids) { return remote.sync<at::Tensor>("lookup", ids); },
        [&](const at::Tensor& x) { return remote.sync<at::Tensor>("mix", x); });
    context.backward(far + Loss(step, local));
    optimizer.step(context);
  }

  Shard local{/*sparse=*/false};
  RRef<Shard> remote = rpc::remote<Shard>("worker2", false);
  DistributedOptimizer optimizer;
};

// Returns LibTorch's own state, as DistributedOptimizer::state() should.
std::vector<at::Tensor> StateOf(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : optimizer.param_groups()[0].params()) {
    auto* const state = optimizer.state().at(parameter.unsafeGetTensorImpl()).get();
    if (const auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(state)) {
      all.insert(all.end(), {torch::tensor(int64_t{1}), sgd->momentum_buffer()});
    } else if (const auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(state)) {
      all.insert(all.end(), {torch::tensor(adagrad->step()), adagrad->sum()});
    } else if (const auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state)) {
      all.insert(all.end(), {torch::tensor(adam->step()), adam->exp_avg(), adam->exp_avg_sq()});
    }
  }
  return all;
}

void ContinueFromAState(const OptimizerSpec& spec, torch::optim::Optimizer& plain,
                        const Shard& plain_shard) {
  for (int step = 0; step < 6; ++step) {
    plain.zero_grad();
    Updated::Loss(step, plain_shard).backward();
    plain.step();
  }
  std::vector<at::Tensor> state, local_state, values, local_values;
  {
    Updated first(spec);
    for (int step = 0; step < 3; ++step) first.Step(step);
    state = first.optimizer.state(first.remote);
    local_state = first.optimizer.local_state();
    values = first.remote.sync<std::vector<at::Tensor>>("values");
    local_values = first.local.Values();
  }
  Updated second(spec);
  ExpectEqual(second.optimizer.state(second.remote), second.optimizer.local_state());
  second.Step(0);  // a loaded state replaces another one
  second.remote.sync<void>("load", values);
  second.local.Load(local_values);
  second.optimizer.load_state(second.remote, state);
  second.optimizer.load_local_state(local_state);
  ExpectEqual(second.optimizer.state(second.remote), state);
  EXPECT_THAT(ErrorOf<RemoteError>([&] { second.optimizer.load_state(second.remote, {}); }),
              HasSubstr("the optimizer's state has " + std::to_string(state.size()) + " tensors"));
  std::vector<at::Tensor> wrong = state;
  wrong[1] = wrong[1].flatten();
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { second.optimizer.load_local_state(wrong); }),
              HasSubstr("tensor 1 of the optimizer's state has another type or shape"));
  for (int step = 3; step < 6; ++step) second.Step(step);
  const std::vector<at::Tensor> expected = StateOf(plain);
  ExpectEqual(second.optimizer.state(second.remote), expected);
  ExpectEqual(second.optimizer.local_state(), expected);
  ExpectEqual(second.remote.sync<std::vector<at::Tensor>>("values"), plain_shard.Values());
  ExpectEqual(second.local.Values(), plain_shard.Values());
}

RANK_TEST(AutogradContextTest, AnOptimizersStateContinuesBitByBit, 3) {
  Job job;
  if (job.rank() == 0) {
    const auto shard = [] { return Shard(/*sparse=*/false); };
    const Shard a = shard(), b = shard(), c = shard();
    torch::optim::SGD plain_sgd(a.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::Adagrad plain_adagrad(b.parameters(), torch::optim::AdagradOptions(0.1));
    torch::optim::Adam plain_adam(c.parameters(), torch::optim::AdamOptions(0.1));
    {
      SCOPED_TRACE("sgd");
      ContinueFromAState(sgd(0.1, 0.9), plain_sgd, a);
    }
    {
      SCOPED_TRACE("adagrad");
      ContinueFromAState(adagrad(0.1), plain_adagrad, b);
    }
    {
      SCOPED_TRACE("adam");
      ContinueFromAState(adam(0.1), plain_adam, c);
    }
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AnOptimizerWithoutAStateSaysSo, 3) {
  Job job;
  if (job.rank() == 0) {
    Updated plain(sgd(0.1));
    plain.Step(0);
    EXPECT_TRUE(plain.optimizer.state(plain.remote).empty());
    plain.optimizer.load_state(plain.remote, {});

    const RRef<Shard> shard = remote<Shard>("worker2", /*sparse=*/true);
    DistributedOptimizer optimizer(sgd(0.1, 0.9), {shard});
    AutogradContext context;
    context.backward(shard.sync<at::Tensor>("lookup", Ids(0, 0)).sum());
    optimizer.step(context);
    EXPECT_THAT(ErrorOf<RemoteError>([&] { optimizer.state(shard); }),
                HasSubstr("a momentum of sparse gradients cannot be saved"));
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimizer.local_state(); }),
                HasSubstr("no local parameters"));
  }
  job.workers->shutdown();
}

// ---- Overlap.

// The last gradients wait until the first bucket has been launched.
RANK_TEST(AutogradContextTest, BucketsAreLaunchedDuringTheBackward, 3) {
  Job job;
  if (job.trainers) {
    Mutex mutex;
    std::vector<std::string> events;
    std::promise<void> launched;
    Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
    DistributedDataParallel model(net, job.trainers,
                                  {.bucket_cap_mb = 1e-5, .find_unused_parameters = true});
    model.register_comm_hook(
        job.trainers, [&](const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
          const MutexLock lock(mutex);
          if (std::find(events.begin(), events.end(), "launch") == events.end()) {
            launched.set_value();
          }
          events.emplace_back("launch");
          return allreduce_hook(group, bucket);
        });
    std::shared_future<void> awaited;
    for (const at::Tensor& leaf : net->first->parameters()) {
      leaf.register_hook([&](const at::Tensor&) {
        EXPECT_EQ(awaited.wait_for(std::chrono::seconds(30)), std::future_status::ready);
        const MutexLock lock(mutex);
        events.emplace_back("leaf");
      });
    }
    for (int step = 0; step < 3; ++step) {
      events.clear();
      launched = {};
      awaited = launched.get_future();
      AutogradContext context;
      context.backward(model.forward(torch::ones({2, 4}), true).sum());
      EXPECT_EQ(events.front(), "launch");
      EXPECT_EQ(std::count(events.begin(), events.end(), "leaf"), 2);
      EXPECT_EQ(events.back(), "launch");
    }
  }
  job.workers->shutdown();
}

}  // namespace
}  // namespace ddp::rpc
