// Compares the values of a ZeroRedundancyOptimizer with those of LibTorch's plain optimizers, to
// the bit. The ranks are threads on a fake backend, which adds in rank order, and processes on Gloo
// and in shared memory.
#include "ddp/optim/zero_redundancy_optimizer.h"

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::AdamW;
using ::ddp::testing::ExpectEqual;
using ::ddp::testing::Factory;
using ::ddp::testing::Groups;
using ::ddp::testing::Inputs;
using ::ddp::testing::Modes;
using ::ddp::testing::Net;
using ::ddp::testing::Optimizers;
using ::ddp::testing::Shard;
using ::ddp::testing::Trainer;
using torch::optim::OptimizerParamGroup;

void ExpectThePlainOptimizersBits(const std::shared_ptr<ProcessGroup>& group, bool scatter) {
  for (const auto& [name, make] : Optimizers()) {
    for (const auto& [mode, options] : Modes(scatter)) {
      Trainer plain = Trainer::Plain(group, make);
      Trainer zero = Trainer::Zero(group, make, options);
      plain.Steps(0, 5);
      zero.Steps(0, 5);
      ExpectEqual(plain, zero, name + " " + mode);
      EXPECT_TRUE(testing::SameOnAllRanks(*group, testing::Flatten(zero.net->parameters())));
    }
  }
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, HasThePlainOptimizersBits, 1, 2, 3) {
  ExpectThePlainOptimizersBits(group, group->size() > 1);
}

// The overlap together with each option of the model that changes its buckets or its passes.
// Without a search for unused parameters, the model ignores the one that has no gradient.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, TheModelMayHaveOtherOptions, 2, 3) {
  auto modes = Modes(true);
  modes.push_back(
      {"scatter and overlap", {.scatter_gradients = true, .overlap_with_forward = true}});
  for (const bool views : {false, true}) {
    const std::vector<std::pair<std::string, DistributedDataParallelOptions>> all = {
        {"unused", {.gradient_as_bucket_view = views, .find_unused_parameters = true}},
        {"static", {.gradient_as_bucket_view = views, .static_graph = true}},
        {"used", {.params_and_buffers_to_ignore = {"unused"}, .gradient_as_bucket_view = views}}};
    for (const auto& [about, model] : all) {
      Trainer plain = Trainer::Plain(group, AdamW(), model);
      plain.Steps(0, 5);
      for (const auto& [mode, options] : modes) {
        Trainer zero = Trainer::Zero(group, AdamW(), options, model);
        zero.Steps(0, 5);
        ExpectEqual(plain, zero, about + " " + mode);
      }
    }
  }
}

RANK_TEST(ZeroRedundancyOptimizerTest, HasThePlainOptimizersBitsOnGloo, .world_size = {2, 3},
          .not_on_device = "only the backend differs from another case's") {
  const auto group = init_process_group({.backend = "gloo"});
  ExpectThePlainOptimizersBits(group, group->size() == 2);
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  EXPECT_FALSE(zero.zero->scatters_gradients());
  plain.Steps(0, 5);
  zero.Steps(0, 5);
  ExpectEqual(plain, zero, "default options");
}

RANK_TEST(ZeroRedundancyOptimizerTest, HasThePlainOptimizersBitsInSharedMemory, {2, 3}) {
  const auto group = init_process_group({.backend = "shm"});
  ExpectThePlainOptimizersBits(group, true);
}

// A model with a complex parameter, which is never cut.
struct ComplexNet : torch::nn::Module {
  ComplexNet() {
    const at::Tensor values = torch::arange(30, at::kFloat).sin_().view({3, 5, 2});
    matrix = register_parameter("matrix", at::view_as_complex(values).clone());
    bias = register_parameter("bias", torch::arange(11, at::kFloat).cos_());
  }
  at::Tensor forward(const at::Tensor& inputs) {
    const at::Tensor outputs = at::matmul(at::complex(inputs, inputs.cos()), matrix);
    return at::view_as_real(outputs).square().mean() + bias.square().sum();
  }
  at::Tensor matrix, bias;
};

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, AComplexParameterIsNotCut, 2, 3) {
  const torch::optim::SGDOptions defaults = torch::optim::SGDOptions(0.1).momentum(0.9);
  const auto train = [&](const ZeroRedundancyOptions* options) {
    auto net = std::make_shared<ComplexNet>();
    DistributedDataParallel<ComplexNet> model(net, group);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (options == nullptr) {
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), defaults);
    } else {
      auto zero =
          std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(model, defaults, *options);
      at::Tensor whole = torch::zeros({1}, at::kLong);
      for (const at::Tensor& part : zero->local_optimizer().param_groups()[0].params()) {
        if (part.is_complex()) whole += part.sizes() == net->matrix.sizes() ? 1 : 100;
      }
      group->all_reduce(whole);
      EXPECT_EQ(whole.item<int64_t>(), 1);
      optimizer = std::move(zero);
    }
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      model.forward(Inputs(group->rank(), step).narrow(1, 0, 3)).backward();
      optimizer->step();
    }
    return std::make_pair(net->matrix.detach(), net->bias.detach());
  };
  const auto plain = train(nullptr);
  for (const bool scatter : {false, true}) {
    const ZeroRedundancyOptions options{.scatter_gradients = scatter};
    const auto zero = train(&options);
    EXPECT_TRUE(at::equal(plain.first, zero.first)) << scatter;
    EXPECT_TRUE(at::equal(plain.second, zero.second)) << scatter;
  }
}

// Float and double in one optimizer.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, ParametersMayHaveDifferentTypes, 2) {
  const auto train = [&](bool sharded, Shard shard) {
    std::vector<at::Tensor> parameters = {torch::arange(7, at::kFloat).requires_grad_(),
                                          torch::arange(5, at::kDouble).requires_grad_()};
    const torch::optim::AdamWOptions defaults(0.1);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (sharded) {
      optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
          parameters, defaults, group, ZeroRedundancyOptions{.shard = shard});
    } else {
      optimizer = std::make_unique<torch::optim::AdamW>(parameters, defaults);
    }
    for (int step = 0; step < 3; ++step) {
      for (at::Tensor& each : parameters) each.mutable_grad() = (each.detach() + step).cos();
      optimizer->step();
    }
    return parameters;
  };
  const auto plain = train(false, Shard::kEven);
  for (const Shard shard : {Shard::kEven, Shard::kWhole}) {
    const auto zero = train(true, shard);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], zero[i])) << i;
  }
}

// The ranks of a part of the group have other numbers in it.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, APartOfTheRanksMayTrain, 4) {
  const auto even = group->new_group({0, 2});
  if (!even) return;
  for (const auto& [mode, options] : Modes(true)) {
    Trainer plain = Trainer::Plain(even, AdamW());
    Trainer zero = Trainer::Zero(even, AdamW(), options);
    plain.Steps(0, 3);
    zero.Steps(0, 3);
    ExpectEqual(plain, zero, mode);
    EXPECT_TRUE(testing::SameOnAllRanks(*even, testing::Flatten(zero.net->parameters())));
  }
}

// PyTorch's test_sharding and test_add_param_group: whole parameters are spread evenly, also those
// that are added later. A large frozen parameter counts as any other.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, AddedParametersAreSpreadToo, 2, 3) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < group->size(); ++i) {
    for (const int64_t size : {9, 7, 5, 3}) parameters.push_back(torch::ones({size, 1}));
  }
  parameters.pop_back();
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  ZeroRedundancyOptimizer<torch::optim::SGD> zero(parameters, torch::optim::SGDOptions(0.1), group,
                                                  {.shard = Shard::kWhole});
  zero.add_param_group(OptimizerParamGroup({torch::ones({3, 1})}));
  int64_t elements = 0;
  for (const OptimizerParamGroup& params : zero.local_optimizer().param_groups()) {
    for (const at::Tensor& parameter : params.params()) elements += parameter.numel();
  }
  EXPECT_EQ(zero.param_groups().size(), 2);
  EXPECT_EQ(zero.local_optimizer().param_groups().size(), 2);
  EXPECT_EQ(elements, 9 + 7 + 5 + 3);
}

// Two modules have one parameter: Module::parameters() lists it twice.
struct Tied : torch::nn::Module {
  Tied() {
    inner = register_module("inner", std::make_shared<Net>());
    register_module("again", inner);
  }
  at::Tensor forward(const at::Tensor& inputs) {
    return inner->forward(inputs) + inner->forward(inputs.cos());
  }
  std::shared_ptr<Net> inner;
};

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, ModulesMayShareAParameter, 2) {
  const torch::optim::AdamWOptions defaults(0.01);
  const auto train = [&](bool sharded) {
    auto net = std::make_shared<Tied>();
    EXPECT_EQ(net->parameters().size(), 2 * net->inner->parameters().size());
    DistributedDataParallel<Tied> model(net, group, {.find_unused_parameters = true});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (sharded) {
      optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(model, defaults);
    } else {
      optimizer = std::make_unique<torch::optim::AdamW>(net->inner->parameters(), defaults);
    }
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      model.forward(Inputs(group->rank(), step)).backward();
      optimizer->step();
    }
    return testing::Flatten(net->inner->parameters());
  };
  EXPECT_TRUE(at::equal(train(false), train(true)));
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, SchedulersAndClosuresWork, 2) {
  for (const auto& [mode, options] : Modes(true)) {
    Trainer plain = Trainer::Plain(group, AdamW());
    Trainer zero = Trainer::Zero(group, AdamW(), options);
    for (Trainer* const trainer : {&plain, &zero}) {
      torch::optim::StepLR scheduler(*trainer->optimizer, 1, 0.5);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor loss = trainer->optimizer->step([&] {
          trainer->optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
          const at::Tensor result = trainer->model.forward(Inputs(group->rank(), step));
          result.backward();
          return result;
        });
        EXPECT_TRUE(loss.defined());
        scheduler.step();
      }
      if (trainer->zero != nullptr) trainer->zero->wait();
    }
    ExpectEqual(plain, zero, mode);
  }
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, AddsParameterGroups, 2, 3) {
  for (const auto& [mode, options] : Modes(true)) {
    const auto train = [&](Trainer& trainer, const auto& add) {
      trainer.Steps(0, 2);
      OptimizerParamGroup added(std::vector<at::Tensor>{trainer.net->second});
      added.set_options(trainer.optimizer->defaults().clone());
      added.options().set_lr(0.1);
      add(added);
      trainer.Steps(2, 5);
    };
    const auto without_second = [&](const Net& net) {
      return Groups{OptimizerParamGroup({net.first, net.image, net.gaps})};
    };
    Trainer plain(group);
    plain.optimizer = AdamW()(without_second(*plain.net));
    train(plain, [&](const auto& added) { plain.optimizer->add_param_group(added); });
    Trainer zero(group);
    auto made = std::make_unique<ZeroRedundancyOptimizerBase>(AdamW(), without_second(*zero.net),
                                                              zero.model, options);
    zero.zero = made.get();
    zero.optimizer = std::move(made);
    train(zero, [&](const auto& added) { zero.zero->add_param_group(added); });
    ExpectEqual(plain, zero, mode);
  }
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, ClipsTheNormOfAllGradients, 2) {
  for (const auto& [mode, options] : Modes(true)) {
    Trainer plain = Trainer::Plain(group, AdamW());
    Trainer zero = Trainer::Zero(group, AdamW(), options);
    plain.model.forward(Inputs(group->rank(), 0)).backward();
    zero.model.forward(Inputs(group->rank(), 0)).backward();
    std::vector<at::Tensor> trained;
    for (const at::Tensor& parameter : plain.net->parameters()) {
      if (parameter.grad().defined()) trained.push_back(parameter);
    }
    const double norm = torch::nn::utils::clip_grad_norm_(trained, 0.5);
    EXPECT_NEAR(zero.zero->clip_grad_norm(0.5), norm, norm * 1e-5) << mode;
    plain.optimizer->step();
    zero.zero->step();
    zero.zero->wait();
    EXPECT_TRUE(at::allclose(plain.net->first, zero.net->first, 1e-4, 1e-6)) << mode;
    EXPECT_NEAR(zero.zero->clip_grad_norm(1e9), 0.5, group->size() == 2 ? 1e-4 : 0) << mode;
  }
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, NoSyncAccumulates, 2) {
  for (const auto& [mode, options] : Modes(true)) {
    Trainer plain = Trainer::Plain(group, AdamW());
    Trainer zero = Trainer::Zero(group, AdamW(), options);
    for (Trainer* const trainer : {&plain, &zero}) {
      for (int step = 0; step < 3; ++step) {
        trainer->optimizer->zero_grad();
        {
          const auto guard = trainer->model.no_sync();
          trainer->model.forward(Inputs(group->rank(), 2 * step)).backward();
        }
        trainer->model.forward(Inputs(group->rank(), 2 * step + 1)).backward();
        trainer->optimizer->step();
      }
      if (trainer->zero != nullptr) trainer->zero->wait();
    }
    ExpectEqual(plain, zero, mode);
  }
}

// In bfloat16, whole parameters have the plain optimizer's bits with any optimizer.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, WholeParametersHaveTheBitsInBfloat16, 2, 3) {
  for (const auto& item : Optimizers()) {
    const Factory& make = item.second;
    const auto train = [&](bool sharded) {
      auto net = std::make_shared<Net>();
      net->to(at::kBFloat16);
      DistributedDataParallel<Net> model(net, group, {.find_unused_parameters = true});
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      const Groups groups = {OptimizerParamGroup(net->parameters())};
      if (sharded) {
        optimizer = std::make_unique<ZeroRedundancyOptimizerBase>(
            make, groups, model, ZeroRedundancyOptions{.shard = Shard::kWhole});
      } else {
        optimizer = make(groups);
      }
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        model.forward(Inputs(group->rank(), step).to(at::kBFloat16)).backward();
        optimizer->step();
      }
      return testing::Flatten(net->parameters());
    };
    EXPECT_TRUE(at::equal(train(false), train(true))) << item.first;
  }
}

// Scattered gradients in bfloat16 are divided as allreduce_hook does.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, WorksInBfloat16, 3) {
  const auto train = [&](bool sharded) {
    auto net = std::make_shared<Net>();
    net->to(at::kBFloat16);
    DistributedDataParallel<Net> model(net, group, {.find_unused_parameters = true});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    const torch::optim::SGDOptions options(0.5);  // every product with it is exact
    if (sharded) {
      optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(
          model, options, ZeroRedundancyOptions{.scatter_gradients = true});
    } else {
      model.register_comm_hook(group, allreduce_hook);
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), options);
    }
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      model.forward(Inputs(group->rank(), step).to(at::kBFloat16)).backward();
      optimizer->step();
    }
    return testing::Flatten(net->parameters());
  };
  EXPECT_TRUE(at::equal(train(false), train(true)));
}

}  // namespace
}  // namespace ddp
