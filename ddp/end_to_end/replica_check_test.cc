// Tests the option check_parameters_every, by which the ranks find out that their replicas have
// drifted apart. On real processes, with parameters below and above 16 KiB.
#include <torch/torch.h>

#include <memory>
#include <string>

#include "ddp/ddp.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::ErrorOfPeer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kNoError[] = "no error";

struct Trainer {
  Trainer(const std::shared_ptr<ProcessGroup>& group, int64_t width,
          DistributedDataParallelOptions options)
      : net(torch::nn::Linear(width, width), torch::nn::Linear(width, width)),
        model(net, group, options),
        optimizer(model->parameters(), 0.01) {}

  // One step. With `local_rate` set, this rank steps with another learning rate than the others.
  void Step(bool local_rate = false) {
    optimizer.zero_grad();
    const int64_t width = net->parameters()[0].size(0);
    model->forward(torch::ones({2, width})).pow(2).mean().backward();
    static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options())
        .lr(local_rate ? 0.02 : 0.01);
    optimizer.step();
  }

  torch::nn::Sequential net;
  DistributedDataParallel<torch::nn::SequentialImpl> model;
  torch::optim::SGD optimizer;
};

void DriftIsNamed() {
  const auto group = init_process_group();
  const bool alone = group->size() == 1;
  const bool culprit = group->rank() == group->size() - 1;
  for (const int64_t width : {8, 128}) {
    Trainer trainer(group, width, {.check_parameters_every = 3});
    EXPECT_EQ(ErrorOf<ReductionError>([&] {
                for (int step = 1; step <= 7; ++step) trainer.Step();
              }),
              kNoError);
    // Forwards 1, 4, 7, 10, ... compare, so a step of forward 8 is found before the 10th.
    const auto finds = [&] {
      trainer.Step(culprit);
      trainer.Step();
      trainer.Step();
    };
    const std::string found = ErrorOf<ReductionError>(finds);
    if (alone) {
      EXPECT_EQ(found, kNoError);
      continue;
    }
    EXPECT_THAT(found, AllOf(StartsWith("the replicas have drifted apart before forward 10: "
                                        "0.weight has other values on rank " +
                                        std::to_string(group->size() - 1) + " than on rank"),
                             HasSubstr("; 4 of 4 parameters differ")));
    // The ranks are in step after the error: the next forwards are made, and compared in turn.
    EXPECT_EQ(ErrorOf<ReductionError>([&] {
                trainer.Step();
                trainer.Step();
              }),
              kNoError);
    EXPECT_THAT(ErrorOf<ReductionError>([&] { trainer.Step(); }), HasSubstr("before forward 13: "));
  }
}

RANK_TEST(ReplicaCheckTest, DriftIsNamedInMemory, {1, 2, 3, 4}) { DriftIsNamed(); }

RANK_TEST(ReplicaCheckTest, DriftIsNamedOnGloo, .world_size = {1, 2, 3, 4},
          .environment = {{"DDP_BACKEND", "gloo"}}) {
  DriftIsNamed();
}

// A model whose ranks load different checkpoints is found in its first forward.
RANK_TEST(ReplicaCheckTest, DifferentStartsAreFoundAtOnce, 2) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  Trainer trainer(group, 64, {.init_sync = false, .check_parameters_every = 1000});
  EXPECT_THAT(ErrorOf<ReductionError>([&] { trainer.Step(); }),
              HasSubstr("before forward 1: 0.weight has other values on rank 1 than on rank 0"));
}

// One rank has registered a frozen parameter since the model was wrapped.
RANK_TEST(ReplicaCheckTest, DifferentListsAreTold, 2) {
  const auto group = init_process_group();
  Trainer trainer(group, 8, {.check_parameters_every = 1});
  trainer.Step();
  if (group->rank() == 1) {
    trainer.net->register_parameter("average", torch::ones({8}), /*requires_grad=*/false);
  }
  EXPECT_THAT(ErrorOf<ReductionError>([&] { trainer.Step(); }),
              HasSubstr("the ranks have different lists of parameters before forward 2: this rank "
                        "has " +
                        std::to_string(4 + group->rank())));
}

// Rank 0 has a batch less. The end of a Join makes the parameters equal, and counts anew.
RANK_TEST(ReplicaCheckTest, AJoinIsNotCompared, 2) {
  const auto group = init_process_group();
  Trainer trainer(group, 64, {.check_parameters_every = 2});
  for (int epoch = 0; epoch < 3; ++epoch) {
    Join join({&trainer.model});
    for (int step = 0; step < 3 + group->rank(); ++step) trainer.Step();
    join.finish();
  }
  trainer.Step();
  trainer.Step(/*local_rate=*/group->rank() == 1);
  EXPECT_THAT(ErrorOf<ReductionError>([&] { trainer.Step(); }),
              HasSubstr("the replicas have drifted apart"));
}

// What differs after a failure (one rank's optimizer has stepped, another's has not) is found by
// the next forward.
RANK_TEST(ReplicaCheckTest, AFailureIsFollowedByAComparison, 2) {
  const auto group = init_process_group();
  Trainer trainer(group, 64, {.check_parameters_every = 1000});
  trainer.Step();
  trainer.Step(/*local_rate=*/group->rank() == 1);
  group->barrier();
  const auto step = [&] { trainer.Step(); };
  if (group->rank() == 0) {
    EXPECT_ANY_THROW(trainer.model->forward(torch::ones({2, 63})));
  } else {
    EXPECT_THAT(ErrorOfPeer<CommunicationError>(*group, step),
                HasSubstr("rank 0: the forward threw"));
  }
  EXPECT_THAT(ErrorOf<ReductionError>(step),
              HasSubstr("0.weight has other values on rank 1 than on rank 0"));
}

RANK_TEST(ReplicaCheckTest, ANegativeNumberIsRefused, 1) {
  const auto group = init_process_group();
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([&] { Trainer(group, 8, {.check_parameters_every = -1}); }),
      HasSubstr("check_parameters_every is a number of forwards"));
}

}  // namespace
}  // namespace ddp
