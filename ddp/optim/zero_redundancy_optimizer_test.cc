// Compares ZeroRedundancyOptimizer with the plain optimizers of LibTorch, to the bit: values,
// states, Joins. The ranks are threads on a fake backend, which adds in rank order, and processes
// on Gloo and in shared memory.
//
// Length: every further file would compile LibTorch's headers once more, which takes 15 s.
#include "ddp/optim/zero_redundancy_optimizer.h"

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/shared_memory/shared_memory_backend.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/optim/shard_state.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
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
using ::ddp::testing::Net;
using ::ddp::testing::Optimizers;
using ::ddp::testing::Shard;
using ::ddp::testing::Trainer;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

constexpr std::chrono::seconds kDeadline{60};

std::vector<std::pair<std::string, ZeroRedundancyOptions>> Modes(bool scatter) {
  std::vector<std::pair<std::string, ZeroRedundancyOptions>> modes = {
      {"whole", {.shard = Shard::kWhole, .bucket_cap_mb = 0.001}},
      {"even", {.scatter_gradients = false, .bucket_cap_mb = 0.001}},
      {"overlap", {.scatter_gradients = false, .overlap_with_forward = true}}};
  if (scatter) {
    modes.push_back({"scatter", {.scatter_gradients = true, .bucket_cap_mb = 0.001}});
    modes.push_back({"scatter in one bucket", {.scatter_gradients = true}});
  }
  return modes;
}

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

RANK_TEST(ZeroRedundancyOptimizerTest, HasThePlainOptimizersBitsOnGloo, {2, 3}) {
  const auto group = init_process_group({.backend = "gloo"});
  ExpectThePlainOptimizersBits(group, group->size() == 2);
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  EXPECT_FALSE(zero.zero->scatters_gradients());
  plain.Steps(0, 5);
  zero.Steps(0, 5);
  ExpectEqual(plain, zero, "default options");
}

// Returns true when other ranks of the host see the memory of a tensor.
bool InArena(const at::Tensor& tensor) {
  return internal::Arena::OfProcess().Contains(tensor.const_data_ptr(), tensor.nbytes());
}

RANK_TEST(ZeroRedundancyOptimizerTest, HasThePlainOptimizersBitsInSharedMemory, {2, 3}) {
  const auto group = init_process_group({.backend = "shm"});
  ExpectThePlainOptimizersBits(group, true);
}

// Parameters move into the arena under all their aliases. One gets other memory on one rank, and is
// moved again; then memory of the test's, where it stays.
RANK_TEST(ZeroRedundancyOptimizerTest, ParametersInSharedMemoryMayMove, {2, 3}) {
  const auto group = init_process_group({.backend = "shm"});
  for (const Shard shard : {Shard::kEven, Shard::kWhole}) {
    for (const bool overlap : {false, true}) {
      std::vector<float> elsewhere(33 * 17);
      Trainer plain = Trainer::Plain(group, AdamW());
      Trainer zero(group);
      const at::Tensor alias = zero.net->second.detach().view({-1});
      auto optimizer = std::make_unique<ZeroRedundancyOptimizerBase>(
          AdamW(), testing::GroupsOf(*zero.net, AdamW()), zero.model,
          ZeroRedundancyOptions{
              .shard = shard, .overlap_with_forward = overlap, .bucket_cap_mb = 0.001});
      zero.zero = optimizer.get();
      zero.optimizer = std::move(optimizer);
      EXPECT_TRUE(InArena(zero.net->first));
      EXPECT_TRUE(InArena(zero.net->image));
      EXPECT_FALSE(InArena(zero.net->gaps));
      EXPECT_FALSE(InArena(zero.net->frozen));
      EXPECT_EQ(alias.const_data_ptr(), zero.net->second.const_data_ptr());
      plain.Steps(0, 2);
      zero.Steps(0, 2);
      ExpectEqual(plain, zero, "in the arena");
      EXPECT_TRUE(at::equal(alias, zero.net->second.detach().view({-1})));
      const auto version = zero.net->first._version();
      plain.Steps(2, 3);
      zero.Steps(2, 3);
      EXPECT_GT(zero.net->first._version(), version);
      if (group->rank() == 1) zero.net->first.set_data(zero.net->first.detach().clone());
      plain.Steps(3, 5);
      zero.Steps(3, 5);
      ExpectEqual(plain, zero, "moved again");
      EXPECT_TRUE(InArena(zero.net->first));
      if (group->rank() == 1) {
        const at::Tensor moved = at::from_blob(elsewhere.data(), {33, 17});
        zero.net->first.set_data(moved.copy_(zero.net->first.detach()));
      }
      plain.Steps(5, 7);
      zero.Steps(5, 7);
      ExpectEqual(plain, zero, "one elsewhere");
      EXPECT_EQ(InArena(zero.net->first), group->rank() != 1);
    }
  }
}

// An optimizer whose steps end with a function.
class CallsAfterSteps : public torch::optim::AdamW {
 public:
  CallsAfterSteps(const Groups& groups, std::function<void()> after)
      : AdamW(groups, torch::optim::AdamWOptions(0.01)), after_(std::move(after)) {}
  at::Tensor step(LossClosure closure) override {
    const at::Tensor loss = AdamW::step(std::move(closure));
    after_();
    return loss;
  }

 private:
  const std::function<void()> after_;
};

RANK_TEST(ZeroRedundancyOptimizerTest, AnInterruptedStepInSharedMemoryIsNamed, {2, 3}) {
  const auto group = init_process_group({.backend = "shm"});
  const c10::intrusive_ptr<c10d::Store> store = group->store();
  std::string fails;  // the key of a failure of rank 1; empty: none comes
  bool stops = false;
  const Factory make = [&](Groups groups) {
    return std::make_unique<CallsAfterSteps>(groups, [&] {
      if (fails.empty()) return;
      if (group->rank() == 1) {
        c10d::Backend& backend = *group->communicator().backend();
        // As a rank that is stopped while it writes into the memory of others.
        if (stops && !internal::HostGroupOf(backend)->BeginTouch()) ADD_FAILURE();
        throw std::runtime_error("no more memory");
      }
      store->wait({fails}, kDeadline);  // then no value can be written
    });
  };
  for (const std::string failure : {"at once", "in an overlap", "stopped"}) {
    const bool overlap = failure == "in an overlap";
    stops = failure == "stopped";
    Trainer plain = Trainer::Plain(group, make);
    Trainer zero = Trainer::Zero(group, make, {.overlap_with_forward = overlap});
    plain.Steps(0, 4);
    zero.Steps(0, 2);
    zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
    std::stringstream archive;
    torch::save(*zero.optimizer, archive);
    const at::Tensor values = testing::Flatten(zero.net->parameters()).clone();
    group->barrier();
    fails = failure;
    EXPECT_NE(testing::ErrorOf<std::exception>([&] { zero.Step(2); }), "no error");
    if (group->rank() == 1) store->set(fails, "1");
    // Nothing uses memory again that a stopped rank may write into.
    EXPECT_EQ(InArena(zero.net->first), !stops || group->rank() == 1);
    {
      const at::NoGradGuard no_grad;  // each rank for itself
      EXPECT_THAT(testing::ErrorOf<ReductionError>([&] { zero.model.forward(Inputs(0, 0)); }),
                  HasSubstr("has interrupted a step"));
    }
    fails.clear();
    std::string error;
    for (int attempt = 0; attempt < 10 && error.find("old and new") == error.npos; ++attempt) {
      error = testing::ErrorOf<std::exception>([&] { zero.Step(2); });
    }
    EXPECT_THAT(error, HasSubstr("has interrupted a step"));
    torch::load(*zero.optimizer, archive);
    int64_t begin = 0;
    for (const at::Tensor& parameter : zero.net->parameters()) {
      const at::NoGradGuard no_grad;
      parameter.copy_(values.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
      begin += parameter.numel();
    }
    zero.Steps(2, 4);
    ExpectEqual(plain, zero, "after a failure");
    EXPECT_TRUE(InArena(zero.net->first));
  }
}

// The memory of the parameters lasts until the peers have written their values, although an
// exception ends the optimizer before.
RANK_TEST(ZeroRedundancyOptimizerTest, AnExceptionWaitsForWritesInSharedMemory, 2) {
  const auto group = init_process_group({.backend = "shm"});
  const c10::intrusive_ptr<c10d::Store> store = group->store();
  const Factory make = [&](Groups groups) {
    return std::make_unique<CallsAfterSteps>(groups, [&] {
      if (group->rank() == 0) return;
      store->wait({"unwinding"}, kDeadline);
      store->set("updated", "1");
    });
  };
  const auto train = [&] {
    Trainer zero = Trainer::Zero(group, make, {.overlap_with_forward = true});
    zero.Step(0);
    if (group->rank() == 0) {
      store->set("unwinding", "1");
      throw std::runtime_error("no more data");
    }
    zero.zero->wait();
  };
  if (group->rank() == 0) {
    EXPECT_EQ(testing::ErrorOf<std::runtime_error>(train), "no more data");
    EXPECT_TRUE(store->check({"updated"}));
  } else {
    train();
  }
}

// A rank is killed at any point of a step, also while it writes.
RANK_TEST(ZeroRedundancyOptimizerTest, APeerKilledInAStepInSharedMemoryIsNamed, .world_size = 3,
          .killed_rank = 1) {
  const auto group = init_process_group({.backend = "shm"});
  const at::Tensor parameter = at::ones({3'000'000}).requires_grad_();
  ZeroRedundancyOptimizer<torch::optim::SGD> zero(std::vector<at::Tensor>{parameter},
                                                  torch::optim::SGDOptions(0.125), group);
  EXPECT_TRUE(InArena(parameter));
  parameter.mutable_grad() = at::ones_like(parameter);
  std::atomic<int> steps = 0;
  std::thread killer;
  if (group->rank() == 1) {
    killer = std::thread([&steps, spins = std::random_device()() % 3'000'000] {
      for (int step = 0; step < 3; ++step) steps.wait(step);
      for (std::atomic<uint32_t> spin = 0; spin < spins; ++spin) {
      }
      ::kill(::getpid(), SIGKILL);
    });
  }
  const std::string error = testing::ErrorOf<CommunicationError>([&] {
    for (int step = 0; step < 1'000'000; ++step) {
      zero.step();
      ++steps;
      steps.notify_all();
    }
  });
  if (killer.joinable()) killer.join();
  EXPECT_THAT(error, HasSubstr("rank 1"));
  const at::Tensor left = parameter.detach().clone();
  // Old and new values of one step, and nothing else.
  EXPECT_LE(left.max().item<float>() - left.min().item<float>(), 0.125F);
  EXPECT_THAT(testing::ErrorOf<PeerFailedError>([&] { zero.step(); }), HasSubstr("rank 1"));
  EXPECT_TRUE(at::equal(parameter, left));
}

// A model with a complex parameter, which is never cut.
struct ComplexNet : torch::nn::Module {
  ComplexNet() {
    const at::Tensor values = at::arange(30, at::kFloat).sin_().view({3, 5, 2});
    matrix = register_parameter("matrix", at::view_as_complex(values).clone());
    bias = register_parameter("bias", at::arange(11, at::kFloat).cos_());
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
      at::Tensor whole = at::zeros({1}, at::kLong);
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
    std::vector<at::Tensor> parameters = {at::arange(7, at::kFloat).requires_grad_(),
                                          at::arange(5, at::kDouble).requires_grad_()};
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

// The numbers of PyTorch's test_state_dict.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, AStateHasOptionsAndMomentum, 1, 2) {
  using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
  const at::Tensor x = at::ones({1}).requires_grad_();
  const auto momentum = [&](const Zero& zero) {
    double sum = 0;
    for (const auto& [key, state] : zero.local_optimizer().state()) {
      const auto& own = static_cast<const torch::optim::SGDParamState&>(*state);
      sum += own.momentum_buffer().item<double>();
    }
    at::Tensor all = at::full({1}, sum);
    group->all_reduce(all);
    return all.item<double>();
  };
  Zero first(std::vector<at::Tensor>{x}, torch::optim::SGDOptions(0.1).momentum(0.9), group);
  x.sum().backward();
  first.step();
  EXPECT_FLOAT_EQ(x.item<float>(), 0.9F);
  EXPECT_FLOAT_EQ(momentum(first), 1);
  first.zero_grad();
  EXPECT_FALSE(x.grad().defined());
  first.consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
  std::stringstream archive;
  torch::save(first, archive);

  Zero second(std::vector<at::Tensor>{x}, torch::optim::SGDOptions(0.01), group);
  torch::load(second, archive);
  const auto& options =
      static_cast<const torch::optim::SGDOptions&>(second.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.1);
  EXPECT_EQ(options.momentum(), 0.9);
  EXPECT_FLOAT_EQ(momentum(second), 1);
  x.sum().backward();
  second.step();
  EXPECT_FLOAT_EQ(x.item<float>(), 0.71F);
  EXPECT_FLOAT_EQ(momentum(second), 1.9);
}

// PyTorch's test_local_optimizer_parity: a parameter is frozen and trained in turn, and each
// optimizer loads the other's state.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, StatesAreExchangedWithThePlainOptimizer, 2) {
  for (const auto& [name, make] : Optimizers()) {
    for (const auto& [mode, options] : Modes(true)) {
      Trainer plain = Trainer::Plain(group, make);
      Trainer zero = Trainer::Zero(group, make, options);
      for (int step = 0; step < 6; ++step) {
        for (Trainer* const trainer : {&plain, &zero}) {
          trainer->Steps(step, step + 1);
          if (step > 2) trainer->net->image.requires_grad_(step % 2 == 0);
        }
        ExpectEqual(plain, zero, name + " " + mode);
      }
      std::stringstream of_zero;
      std::stringstream of_plain;
      zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
      torch::save(*zero.optimizer, of_zero);
      torch::save(*plain.optimizer, of_plain);
      torch::load(*plain.optimizer, of_zero);
      torch::load(*zero.optimizer, of_plain);
      plain.Steps(6, 8);
      zero.Steps(6, 8);
      ExpectEqual(plain, zero, name + " " + mode + " exchanged");
    }
  }
}

// PyTorch's test_sharding and test_add_param_group: whole parameters are spread evenly, also those
// that are added later. A large frozen parameter counts as any other.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, AddedParametersAreSpreadToo, 2, 3) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < group->size(); ++i) {
    for (const int64_t size : {9, 7, 5, 3}) parameters.push_back(at::ones({size, 1}));
  }
  parameters.pop_back();
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  ZeroRedundancyOptimizer<torch::optim::SGD> zero(parameters, torch::optim::SGDOptions(0.1), group,
                                                  {.shard = Shard::kWhole});
  zero.add_param_group(OptimizerParamGroup({at::ones({3, 1})}));
  int64_t elements = 0;
  for (const OptimizerParamGroup& params : zero.local_optimizer().param_groups()) {
    for (const at::Tensor& parameter : params.params()) elements += parameter.numel();
  }
  EXPECT_EQ(zero.param_groups().size(), 2);
  EXPECT_EQ(zero.local_optimizer().param_groups().size(), 2);
  EXPECT_EQ(elements, 9 + 7 + 5 + 3);
}

// Returns the elements of an AdamW's states.
int64_t StateElements(const torch::optim::Optimizer& optimizer) {
  int64_t elements = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    elements += moments.exp_avg().numel() + moments.exp_avg_sq().numel();
  }
  return elements;
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, EachRankHoldsItsShareOfTheState, 2, 3) {
  const int64_t ranks = group->size();
  for (const Shard shard : {Shard::kEven, Shard::kWhole}) {
    const int64_t size = 3 * ranks;
    std::vector<at::Tensor> parameters;
    for (int64_t i = 0; i < ranks; ++i) parameters.push_back(at::ones({size, 4}).requires_grad_());
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(parameters, torch::optim::AdamWOptions(0.1),
                                                      group, {.shard = shard});
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::ones({size, 4});
    zero.step();
    EXPECT_EQ(StateElements(zero.local_optimizer()) * ranks, 2 * ranks * size * 4);
    for (const at::Tensor& parameter : parameters) EXPECT_LT(parameter.max().item<float>(), 1);
  }
}

// A state from before a change of the options that makes new states impossible.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, StatesOutliveTheOptionsThatMadeThem, 2) {
  const Factory make = [](Groups groups) {
    return std::make_unique<torch::optim::SGD>(groups,
                                               torch::optim::SGDOptions(0.01).momentum(0.9));
  };
  const auto set_momentum = [](Trainer& trainer, double momentum) {
    for (auto& each : trainer.optimizer->param_groups()) {
      static_cast<torch::optim::SGDOptions&>(each.options()).momentum(momentum);
    }
  };
  const auto train = [&](Trainer trainer) {
    trainer.Steps(0, 3);
    set_momentum(trainer, 0);
    trainer.Steps(3, 4);
    if (trainer.zero != nullptr) trainer.zero->consolidate_state_dict(-1);
    std::stringstream archive;
    torch::save(*trainer.optimizer, archive);
    torch::load(*trainer.optimizer, archive);
    set_momentum(trainer, 0.9);
    trainer.Steps(4, 6);
    return trainer;
  };
  const Trainer plain = train(Trainer::Plain(group, make));
  for (const auto& [mode, options] : Modes(true)) {
    ExpectEqual(plain, train(Trainer::Zero(group, make, options)), mode);
  }
}

// Returns the values of a state by their names in its serialization.
std::map<std::string, c10::IValue> ValuesOf(const torch::optim::OptimizerParamState& state) {
  torch::serialize::OutputArchive out;
  state.serialize(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  std::map<std::string, c10::IValue> values;
  for (const std::string& key : in.keys()) in.read(key, values[key]);
  return values;
}

// Expects the types and sizes of `expected`. Its values too where the state is `filled`; else no
// tensor has the memory of more than one element.
void ExpectSameState(const torch::optim::OptimizerParamState& state,
                     const torch::optim::OptimizerParamState& expected, bool filled,
                     const std::string& about) {
  const auto mine = ValuesOf(state);
  const auto others = ValuesOf(expected);
  ASSERT_EQ(mine.size(), others.size()) << about;
  for (const auto& [name, value] : mine) {
    const c10::IValue& other = others.at(name);
    ASSERT_EQ(value.isTensor(), other.isTensor()) << about << " " << name;
    if (!value.isTensor()) {
      EXPECT_EQ(value, other) << about << " " << name;
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    ASSERT_EQ(tensor.sizes(), other.toTensor().sizes()) << about << " " << name;
    EXPECT_EQ(tensor.scalar_type(), other.toTensor().scalar_type()) << about << " " << name;
    if (filled) {
      EXPECT_TRUE(at::equal(tensor, other.toTensor())) << about << " " << name;
    } else {
      EXPECT_LE(tensor.storage().nbytes(), tensor.element_size()) << about << " " << name;
    }
  }
}

// Keeps the largest number of bytes in use at a time, as seen when a tensor gets memory.
class PeakOfMemory : public c10::Allocator {
 public:
  PeakOfMemory() { c10::SetCPUAllocator(this, 1); }
  ~PeakOfMemory() override { c10::SetCPUAllocator(plain_, 1); }

  static int64_t InUse() {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  }
  int64_t peak() const { return peak_; }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = plain_->allocate(bytes);
    peak_ = std::max(peak_, InUse());
    return data;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const plain_ = c10::GetCPUAllocator();
  int64_t peak_ = 0;
};

TEST(ZeroRedundancyOptimizerTest, AStateIsPutTogetherInTwiceItsMemory) {
  constexpr int64_t kPart = 200'000;
  constexpr int kParameters = 10;
  const auto make = [](Groups groups) {
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < kParameters; ++i) parameters.push_back(at::zeros({3 * kPart}));
  const auto whole = make({OptimizerParamGroup(parameters)});
  const int64_t before = PeakOfMemory::InUse();
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<torch::optim::SGDParamState> states(kParameters);
    std::vector<internal::StatePart> parts;
    for (int i = 0; i < kParameters; ++i) {
      states[i].momentum_buffer(at::full({kPart}, rank, at::kFloat));
      parts.push_back(
          {.parameter = i, .begin = rank * kPart, .end = (rank + 1) * kPart, .state = &states[i]});
    }
    texts.push_back(internal::StateBytes(parts));
    texts.back().shrink_to_fit();  // as CollectTexts() returns it
  }
  const PeakOfMemory memory;
  internal::AssembleState(std::move(texts), make, nullptr, *whole);
  const auto& state = static_cast<const torch::optim::SGDParamState&>(
      *whole->state().at(parameters[4].unsafeGetTensorImpl()));
  EXPECT_EQ(state.momentum_buffer()[2 * kPart].item<float>(), 2);
  EXPECT_LE(memory.peak() - before, 2 * int64_t{4} * 3 * kPart * kParameters);
}

// Returns the bytes of memory of an optimizer's SGD states. Elements may share one place.
int64_t MomentumBytes(const torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& own = static_cast<const torch::optim::SGDParamState&>(*state);
    bytes += static_cast<int64_t>(own.momentum_buffer().storage().nbytes());
  }
  return bytes;
}

// A rank that needs two of ten states holds these, and about four times one batch.
TEST(ZeroRedundancyOptimizerTest, AShareOfAStateIsFilledInBatches) {
  constexpr int64_t kSize = 600'000;
  constexpr int64_t kBytes = 4 * kSize;
  constexpr int kParameters = 10;
  const auto make = [](Groups groups) {
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  ProcessGroup group(c10::make_intrusive<c10d::HashStore>(), {});
  std::vector<at::Tensor> parameters;
  std::vector<torch::optim::SGDParamState> states(kParameters);
  std::vector<internal::StatePart> parts;
  for (int i = 0; i < kParameters; ++i) {
    parameters.push_back(at::zeros({kSize}));
    states[i].momentum_buffer(at::full({kSize}, i, at::kFloat));
    parts.push_back({.parameter = i, .begin = 0, .end = kSize, .state = &states[i]});
  }
  const auto whole = make({OptimizerParamGroup(parameters)});
  const int64_t before = PeakOfMemory::InUse();
  const PeakOfMemory memory;
  internal::AssembleForms({internal::FormBytes(parts)}, make, nullptr, *whole);
  EXPECT_EQ(MomentumBytes(*whole), kParameters * 4);
  std::vector<bool> needed(kParameters);
  needed[3] = needed[7] = true;
  const int64_t held =
      internal::FillStates(group, parts, needed, *whole, {.batch_bytes = kBytes + 1});
  EXPECT_GE(held, kBytes);
  EXPECT_LT(held, kBytes + kBytes / 10);
  EXPECT_EQ(MomentumBytes(*whole), 2 * kBytes + (kParameters - 2) * 4);
  EXPECT_LT(memory.peak() - before, (2 + 4) * kBytes + kBytes / 2);
  for (const int i : {3, 7}) {
    const auto& state = static_cast<const torch::optim::SGDParamState&>(
        *whole->state().at(parameters[i].unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.momentum_buffer(), states[i].momentum_buffer()));
  }
}

// Ranks need different states, and some of them the same one.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, EachRankGetsTheStatesThatItNeeds, 1, 2, 3) {
  for (const auto& [name, make] : Optimizers()) {
    for (const auto& [mode, options] : Modes(group->size() > 1)) {
      Trainer zero = Trainer::Zero(group, make, options);
      zero.Steps(0, 3);
      const auto described = zero.zero->DescribeState();
      const size_t count = zero.net->parameters().size();
      std::vector<bool> needed(count);
      for (size_t i = 0; i < count; ++i) {
        needed[i] = i % 3 == 0 || static_cast<int>(i) % group->size() == group->rank();
      }
      zero.zero->FillState(*described, needed);
      zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
      std::stringstream archive;
      torch::save(*zero.optimizer, archive);
      const auto whole = zero.zero->EmptyOptimizer();
      torch::load(*whole, archive);
      ASSERT_EQ(described->state().size(), whole->state().size());
      size_t number = 0;
      for (const OptimizerParamGroup& params : whole->param_groups()) {
        for (const at::Tensor& parameter : params.params()) {
          const void* const key = parameter.unsafeGetTensorImpl();
          const auto expected = whole->state().find(const_cast<void*>(key));
          const bool filled = needed[number++];
          if (expected == whole->state().end()) continue;
          ExpectSameState(*described->state().at(const_cast<void*>(key)), *expected->second, filled,
                          absl::StrCat(name, " ", mode, " parameter ", number - 1));
        }
      }
    }
  }
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

// Saves in one mode and loads in another, on another number of ranks, and by the plain optimizer.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, StatesMoveBetweenModesAndWorldSizes, 3) {
  for (const auto& [name, make] : Optimizers()) {
    Trainer zero = Trainer::Zero(group, make, {.bucket_cap_mb = 0.001});
    zero.Steps(0, 3);
    zero.zero->param_groups()[0].options().set_lr(0.03);
    zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
    std::stringstream archive;
    torch::save(*zero.optimizer, archive);
    const auto pair = group->new_group({0, 1});
    if (!pair) continue;
    Trainer plain = Trainer::Plain(pair, make);
    Trainer whole = Trainer::Zero(pair, make, {.shard = Shard::kWhole});
    Trainer even = Trainer::Zero(pair, make, {.scatter_gradients = true, .bucket_cap_mb = 0.01});
    for (Trainer* const trainer : {&plain, &whole, &even}) {
      const at::NoGradGuard no_grad;
      for (const auto& item : trainer->net->named_parameters()) {
        item.value().copy_(zero.net->named_parameters()[item.key()]);
      }
      std::stringstream copy(archive.str());
      torch::load(*trainer->optimizer, copy);
      EXPECT_EQ(trainer->optimizer->param_groups()[0].options().get_lr(), 0.03);
    }
    for (Trainer* const trainer : {&plain, &whole, &even}) trainer->Steps(3, 6);
    ExpectEqual(plain, whole, name + " whole");
    ExpectEqual(plain, even, name + " even");
  }
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, TheStateIsOnTheRankThatWasAskedFor, 3) {
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  zero.Steps(0, 2);
  std::stringstream archive;
  const auto save = [&] { torch::save(*zero.optimizer, archive); };
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>(save), HasSubstr("consolidate_state_dict(to)"));
  zero.zero->consolidate_state_dict(1);
  if (group->rank() == 1) {
    save();
  } else {
    EXPECT_THAT(testing::ErrorOf<ConfigurationError>(save), HasSubstr("has not the whole state"));
  }
  zero.Steps(2, 3);  // the collected state is now old
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>(save), HasSubstr("after the last step()"));
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>(
                  [&] { zero.zero->consolidate_state_dict(group->rank() == 2 ? 0 : 1); }),
              HasSubstr("different arguments of consolidate_state_dict()"));
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>([&] { zero.zero->consolidate_state_dict(3); }),
              HasSubstr("ranks 0 to 2"));
  EXPECT_FALSE(group->failed());
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

// Trains with inputs of different lengths; `longest` has most. Then one step with all ranks.
void TrainUnevenly(Trainer& trainer, int longest, bool even_weights) {
  const int rank = trainer.group->rank();
  torch::optim::StepLR scheduler(*trainer.optimizer, 2, 0.5);
  join({&trainer.model, trainer.optimizer.get()}, {.divide_by_initial_world_size = even_weights},
       [&] {
         const int steps = rank == longest ? 5 : 1 + rank;
         for (int step = 0; step < steps; ++step) {
           trainer.Step(step);
           scheduler.step();
         }
       });
  trainer.Steps(7, 9);
}

THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, RanksWithoutInputsUpdateTheirPart, 2, 3) {
  for (const bool even_weights : {true, false}) {
    for (int longest = 0; longest < group->size(); ++longest) {
      for (const auto& [mode, options] : Modes(true)) {
        Trainer plain = Trainer::Plain(group, AdamW());
        Trainer zero = Trainer::Zero(group, AdamW(), options);
        TrainUnevenly(plain, longest, even_weights);
        TrainUnevenly(zero, longest, even_weights);
        ExpectEqual(plain, zero, mode);
        for (int g = 0; g < 2; ++g) {
          EXPECT_EQ(plain.optimizer->param_groups()[g].options().get_lr(),
                    zero.optimizer->param_groups()[g].options().get_lr())
              << mode;
        }
      }
    }
  }
}

// Rank 0 takes part in the steps of rank 1 only.
THREAD_RANK_TEST(ZeroRedundancyOptimizerTest, AStateOfBeforeAJoinIsNotSaved, 2) {
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  zero.Steps(0, 1);
  zero.zero->consolidate_state_dict(0);
  join({&zero.model, zero.zero}, {}, [&] {
    if (group->rank() == 1) zero.Step(1);
  });
  std::stringstream archive;
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>([&] { torch::save(*zero.zero, archive); }),
              HasSubstr("call consolidate_state_dict(to)"));
}

RANK_TEST(ZeroRedundancyOptimizerTest, JoinsInSharedMemory, 3) {
  const auto group = init_process_group({.backend = "shm"});
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  for (Trainer* const trainer : {&plain, &zero}) TrainUnevenly(*trainer, 1, true);
  ExpectEqual(plain, zero, "default options");
}

RANK_TEST(ZeroRedundancyOptimizerTest, JoinsOnGloo, 3) {
  const auto group = init_process_group({.backend = "gloo"});
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  Trainer scattering = Trainer::Zero(group, AdamW(), {.scatter_gradients = true});
  EXPECT_FALSE(zero.zero->scatters_gradients());  // the default on Gloo
  EXPECT_TRUE(scattering.zero->scatters_gradients());
  for (Trainer* const trainer : {&plain, &zero, &scattering}) TrainUnevenly(*trainer, 1, true);
  ExpectEqual(plain, zero, "default options");
  EXPECT_TRUE(at::allclose(plain.net->first, scattering.net->first, 1e-4, 1e-6));
  EXPECT_TRUE(testing::SameOnAllRanks(*group, testing::Flatten(scattering.net->parameters())));
}

}  // namespace
}  // namespace ddp
