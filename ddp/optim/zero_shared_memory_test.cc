// Parameters of a ZeroRedundancyOptimizer in memory that the ranks of a host share: moves and
// failures. The ranks are processes.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <signal.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/comm/arena/arena.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/engine_backend/engine_backend.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/common/error.h"
#include "ddp/join.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

NOT_ON_DEVICE("the subject is shared memory");

using ::ddp::testing::AdamW;
using ::ddp::testing::ExpectEqual;
using ::ddp::testing::Factory;
using ::ddp::testing::Groups;
using ::ddp::testing::Inputs;
using ::ddp::testing::Shard;
using ::ddp::testing::Trainer;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kDeadline{60};

// Returns true when other ranks of the host see the memory of a tensor.
bool InArena(const at::Tensor& tensor) {
  return internal::Arena::OfProcess().Contains(tensor.const_data_ptr(), tensor.nbytes());
}

// Parameters move into the arena under all their aliases. One gets other memory on one rank, and is
// moved again; then memory of the test's, where it stays.
RANK_TEST(ZeroSharedMemoryTest, ParametersInSharedMemoryMayMove, {2, 3}) {
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

RANK_TEST(ZeroSharedMemoryTest, AnInterruptedStepInSharedMemoryIsNamed, {2, 3}) {
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
        if (stops && !internal::OneHostGroupOf(backend)->BeginTouch()) ADD_FAILURE();
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
RANK_TEST(ZeroSharedMemoryTest, AnExceptionWaitsForWritesInSharedMemory, 2) {
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
RANK_TEST(ZeroSharedMemoryTest, APeerKilledInAStepInSharedMemoryIsNamed, .world_size = 3,
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

}  // namespace
}  // namespace ddp
