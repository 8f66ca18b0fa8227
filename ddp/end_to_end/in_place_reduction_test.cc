// Tests gradients that are reduced where they lie, through the wrapper: ranks of one host that
// share memory, with parameters of 16 KiB and more. Each averaged gradient is compared with the
// average that one process computes.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::RankTestOptions;
using ::ddp::testing::SameOnAllRanks;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

// The subject is what shared memory does, whatever DDP_BACKEND says of other tests.
RankTestOptions InSharedMemory(RankTestOptions options) {
  options.environment["DDP_BACKEND"] = "shm";
  return options;
}

// Two weights of 32 KiB, two biases, and two vectors of 32 KiB.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(64, 128));
    last = register_module("last", torch::nn::Linear(128, 64));
    p = register_parameter("p", torch::ones({8192}));
    q = register_parameter("q", torch::ones({8192}));
  }
  Tensor forward(const Tensor& x) {
    hidden = first->forward(x);
    // Autograd gives p and q gradients that share one storage.
    const Tensor scale = (p.view({64, 128}) + q.view({64, 128})).slice(0, 0, x.size(0));
    return last->forward(torch::tanh(hidden) * scale);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  Tensor p, q, hidden;
};
TORCH_MODULE(Net);

Tensor Input(int rank, int step) { return RandomNumbers(100 * step + rank, {8, 64}); }

// Returns the average gradients of all ranks, in the order of the parameters.
std::vector<Tensor> Expected(const Net& net, int size, int step, at::ScalarType type = at::kFloat) {
  Net copy;
  copy->to(type);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      copy->parameters()[i].copy_(net->parameters()[i]);
    }
  }
  // One rank after the other: plain autograd adds to p's and q's shared storage twice.
  std::vector<Tensor> averages;
  for (int rank = 0; rank < size; ++rank) {
    copy->zero_grad();
    copy->forward(Input(rank, step).to(type)).pow(2).mean().backward();
    for (size_t i = 0; i < copy->parameters().size(); ++i) {
      if (rank == 0) averages.push_back(torch::zeros_like(copy->parameters()[i]));
      averages[i] = averages[i].detach() + copy->parameters()[i].grad() / size;
    }
  }
  return averages;
}

void ExpectAverages(const ProcessGroup& group, const Net& net,
                    const std::vector<Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), expected[i], 1e-4, 1e-7))
        << "parameter " << i << " on rank " << group.rank();
  }
}

struct Trainer {
  explicit Trainer(const std::shared_ptr<ProcessGroup>& given,
                   const DistributedDataParallelOptions& options = {})
      : group(given), model((Randomize(*net, 1), net), given, options) {}

  void Step(int step, at::ScalarType type = at::kFloat) {
    net->zero_grad();
    const std::vector<Tensor> expected = Expected(net, group->size(), step, type);
    model.forward(Input(group->rank(), step).to(type)).pow(2).mean().backward();
    ExpectAverages(*group, net, expected);
    for (const Tensor& parameter : net->parameters()) {
      EXPECT_TRUE(SameOnAllRanks(*group, parameter.grad()));
    }
  }
  std::string strategy() const { return model.logging_data().reduction_strategy; }

  std::shared_ptr<ProcessGroup> group;
  Net net;
  DistributedDataParallel<NetImpl> model;
};

RANK_TEST(InPlaceReductionTest, AveragesWhatLiesInTheArenaAndWhatDoesNot,
          InSharedMemory({{2, 3}})) {
  Trainer trainer(init_process_group());
  for (int step = 0; step < 5; ++step) trainer.Step(step);
  EXPECT_THAT(trainer.strategy(), HasSubstr("in place: 4 gradients where they lie, 2 packed"));
  EXPECT_THAT(trainer.strategy(), HasSubstr("2 were copied into the arena")) << "p and q";
  EXPECT_THAT(trainer.strategy(), Not(HasSubstr("no room")));
}

RANK_TEST(InPlaceReductionTest, FollowsTheModuleToAnotherType, InSharedMemory({2})) {
  Trainer trainer(init_process_group());
  trainer.Step(0);
  trainer.net->to(at::kDouble);
  for (int step = 1; step < 4; ++step) trainer.Step(step, at::kDouble);
  EXPECT_THAT(trainer.strategy(), HasSubstr("in place: 4 gradients where they lie"));
  EXPECT_THAT(trainer.strategy(), Not(HasSubstr("no room")));
}

RANK_TEST(InPlaceReductionTest, WithoutRoomEachGradientHasAnAllReduce, InSharedMemory({2})) {
  Trainer trainer(init_process_group(), {.arena_bytes = 1});
  for (int step = 0; step < 3; ++step) trainer.Step(step);
  EXPECT_THAT(trainer.strategy(), HasSubstr("4 found no room in the arena: raise arena_bytes"));
}

// Peers write into the memory that the hook has published, not into the gradient's new one.
RANK_TEST(InPlaceReductionTest, AGradientMayGetOtherMemoryInTheBackward, InSharedMemory({2})) {
  Trainer trainer(init_process_group());
  for (int step = 0; step < 3; ++step) {
    trainer.net->zero_grad();
    const std::vector<Tensor> expected = Expected(trainer.net, 2, step);
    const Tensor output = trainer.model.forward(Input(trainer.group->rank(), step));
    Tensor& gradient = trainer.net->last->weight.mutable_grad();
    int calls = 0;
    trainer.net->hidden.register_hook([&](const Tensor& /*grad*/) {  // after that of last.weight
      ++calls;
      ASSERT_TRUE(gradient.defined());
      gradient.set_data(torch::full_like(gradient, 7));
    });
    output.pow(2).mean().backward();
    EXPECT_EQ(calls, 1);
    ExpectAverages(*trainer.group, trainer.net, expected);
  }
}

RANK_TEST(InPlaceReductionTest, ModelsComeAndGoBesideOneThatStays, InSharedMemory({2})) {
  const auto group = init_process_group();
  Trainer stays(group);
  for (int round = 0; round < 40; ++round) {
    Trainer goes(group);
    if (round % 4 == 0) goes.Step(round);
    EXPECT_THAT(goes.strategy(), HasSubstr("in place")) << round;
  }
  stays.Step(0);
}

}  // namespace
}  // namespace ddp
