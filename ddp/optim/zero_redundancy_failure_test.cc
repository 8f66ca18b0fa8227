// Tests of ZeroRedundancyOptimizer with failing ranks, mistakes of a program, and ranks that call
// different functions.
//
// Length: one case for each way in which a step or a call fails, with the same helpers.
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddp/common/error.h"
#include "ddp/join.h"
#include "ddp/optim/shard_state.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"

namespace ddp {
namespace {

NOT_ON_DEVICE("a rank is ahead of its sums there; step_failure_test has its failures");

using ::ddp::testing::AdamW;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::ExpectEqual;
using ::ddp::testing::FakeCall;
using ::ddp::testing::FakeFate;
using ::ddp::testing::Groups;
using ::ddp::testing::GroupsOf;
using ::ddp::testing::Inputs;
using ::ddp::testing::RunThreadRanks;
using ::ddp::testing::Shard;
using ::ddp::testing::Trainer;
using ::ddp::testing::Unsaved;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using ZeroSgd = ZeroRedundancyOptimizer<torch::optim::SGD>;

at::Tensor Parameter(at::IntArrayRef shape = {4, 3}) { return torch::ones(shape).requires_grad_(); }

THREAD_RANK_TEST(ZeroRedundancyFailureTest, TheConstructorNamesMistakesOnEveryRank, 2) {
  const at::Tensor parameter = Parameter();
  const bool odd = group->rank() == 1;
  const auto error_of = [&](const Groups& groups, double lr = 0.1,
                            const ZeroRedundancyOptions& options = {}) {
    return ErrorOf<ConfigurationError>([&] { ZeroSgd(groups, SGDOptions(lr), group, options); });
  };
  const auto of = [](std::vector<at::Tensor> parameters) {
    return Groups{OptimizerParamGroup(std::move(parameters))};
  };
  EXPECT_THAT(error_of({}), HasSubstr("there is no parameter"));
  EXPECT_THAT(error_of(of({})), HasSubstr("there is no parameter"));
  EXPECT_THAT(error_of(of({at::Tensor()})), HasSubstr("parameter 0 of group 0 is undefined"));
  EXPECT_THAT(error_of(of({parameter, parameter * 2})),
              HasSubstr("parameter 1 of group 0 is no leaf"));
  EXPECT_THAT(error_of({OptimizerParamGroup({parameter}), OptimizerParamGroup({parameter})}),
              HasSubstr("parameter 0 of group 1 is there twice"));
  EXPECT_THAT(error_of(of({torch::ones({2}).to_sparse()})), HasSubstr("is not dense"));
  EXPECT_THAT(error_of(of({torch::empty({2}, at::kMeta)})), HasSubstr("is on meta"));
  EXPECT_THAT(error_of(of({parameter}), -1), HasSubstr("Invalid learning rate"));
  EXPECT_THAT(error_of(of({parameter}), 0.1, {.bucket_cap_mb = 0}), HasSubstr("must be positive"));
  EXPECT_THAT(error_of(of({parameter}), 0.1, {.scatter_gradients = true}),
              HasSubstr("scatter_gradients needs the constructor that takes the model"));
  EXPECT_THAT(error_of(of({parameter}), 0.1, {.overlap_with_forward = true}),
              HasSubstr("overlap_with_forward needs the constructor that takes the model"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                ZeroRedundancyOptimizer<torch::optim::LBFGS>({parameter},
                                                             torch::optim::LBFGSOptions(1), group);
              }),
              HasSubstr("LBFGS needs all gradients together"));
  // On one rank only.
  EXPECT_THAT(error_of(of({parameter}), odd ? -1 : 0.1),
              AllOf(HasSubstr("Invalid learning rate"), HasSubstr("on rank 1")));
  EXPECT_THAT(error_of(of({odd ? Parameter({4, 3}).detach().t().contiguous().t() : parameter})),
              AllOf(HasSubstr("strides [1, 4]"), HasSubstr("on rank 1")));
  EXPECT_THAT(error_of(of({parameter}), 0.1, {.shard = odd ? Shard::kWhole : Shard::kEven}),
              HasSubstr("different arguments of a ZeroRedundancyOptimizer"));
  EXPECT_FALSE(group->failed());
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AGroupOfTheBaseClassIsNamedOnEveryRank, 2) {
  for (const bool on_all : {true, false}) {
    const at::Tensor parameter = Parameter();
    ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
    parameter.mutable_grad() = torch::ones({4, 3});
    torch::optim::Optimizer& base = zero;
    if (on_all || group->rank() == 1) base.add_param_group(OptimizerParamGroup({Parameter()}));
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.step(); }),
                AllOf(HasSubstr(on_all ? "rank 0:" : "rank 1:"),
                      HasSubstr("call its own add_param_group() on every rank")));
    EXPECT_TRUE(at::equal(parameter, torch::ones({4, 3})));
    EXPECT_FALSE(group->failed());
  }
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AddParamGroupChecksItsArguments, 2) {
  const at::Tensor parameter = Parameter();
  ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([&] { zero.add_param_group(OptimizerParamGroup({parameter})); }),
      HasSubstr("is there twice"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                zero.add_param_group(OptimizerParamGroup({Parameter({group->rank() + 1})}));
              }),
              HasSubstr("different arguments"));
  EXPECT_EQ(zero.param_groups().size(), 1);
  EXPECT_FALSE(group->failed());
  parameter.mutable_grad() = torch::ones({4, 3});
  zero.step();
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AParameterGroupUnderAJoinIsRefused, 2) {
  for (const bool by_base : {true, false}) {
    const at::Tensor parameter = Parameter();
    ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
    const auto train = [&] {
      join({&zero}, {}, [&] {
        if (group->rank() == 1) return;
        parameter.mutable_grad() = torch::ones({4, 3});
        zero.step();
        torch::optim::Optimizer& base = zero;
        const OptimizerParamGroup added({Parameter()});
        by_base ? base.add_param_group(added) : zero.add_param_group(added);
        zero.step();
      });
    };
    // The base class's mistake is found in the next step; the other one by the caller alone.
    const bool told = !by_base && group->rank() == 1;
    EXPECT_THAT(told ? ErrorOf<PeerFailedError>(train) : ErrorOf<ConfigurationError>(train),
                AllOf(HasSubstr("add_param_group()"), Not(HasSubstr("another error"))));
    // The loop ended early, which all ranks know.
    std::string unusable = "not tried";
    for (int attempt = 0; attempt < 3 && unusable != "no error"; ++attempt) {
      unusable = ErrorOf<c10::Error>([&] { group->ensure_usable(); });
    }
    EXPECT_EQ(unusable, "no error");
  }
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AnUnusableGradientOrParameterChangesNothing, 2) {
  const at::Tensor parameter = Parameter();
  ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
  parameter.mutable_grad() =
      group->rank() == 1 ? torch::ones({4, 3}).to_sparse() : torch::ones({4, 3});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.step(); }),
              HasSubstr("rank 1: the gradient of parameter 0"));
  parameter.mutable_grad() = torch::ones({4, 3});
  const at::Tensor before = parameter.detach();
  if (group->rank() == 0) parameter.set_data(torch::ones({3, 4}));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.step(); }),
              HasSubstr("rank 0: parameter 0 of a ZeroRedundancyOptimizer has another type"));
  parameter.set_data(before.clone());  // other memory
  EXPECT_FALSE(group->failed());
  zero.step();
  EXPECT_TRUE(at::allclose(parameter, torch::full({4, 3}, 0.9F)));
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, OtherLearningRatesAreNamedOnEveryRank, 3) {
  const at::Tensor parameter = Parameter();
  ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
  parameter.mutable_grad() = torch::ones({4, 3});
  if (group->rank() == 1) zero.param_groups()[0].options().set_lr(0.2);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.step(); }),
              HasSubstr("rank 1: a ZeroRedundancyOptimizer has other learning rates"));
  EXPECT_TRUE(at::equal(parameter, torch::ones({4, 3})));
  EXPECT_FALSE(group->failed());
  zero.param_groups()[0].options().set_lr(0.2);
  zero.step();
  EXPECT_TRUE(at::allclose(parameter, torch::full({4, 3}, 0.8F)));
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AFailedClosureIsReported, 2) {
  const at::Tensor parameter = Parameter();
  ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
  parameter.mutable_grad() = torch::ones({4, 3});
  const auto closure = [&]() -> at::Tensor {
    if (group->rank() == 1) throw std::runtime_error("no more data");
    return torch::ones({});
  };
  const std::string error = ErrorOf<std::exception>([&] { zero.step(closure); });
  EXPECT_THAT(error, HasSubstr("no more data"));
  group->renew();
  zero.step();  // nothing was torn
}

// Returns a script in which rank 1's next operation of `kind` fails once `failing` is set.
std::function<FakeFate(const FakeCall&)> FailsOnce(std::shared_ptr<std::atomic<bool>> failing,
                                                   FakeCall::Kind kind) {
  return [failing = std::move(failing), kind](const FakeCall& call) -> FakeFate {
    if (call.rank != 1 || call.kind != kind || !failing->exchange(false)) return {};
    return {.error = "the wire broke"};
  };
}

// Calls `action` until its error has one of `texts`: the first errors are those of a failure.
// Returns the last error.
std::string Retry(const std::vector<std::string>& texts, const std::function<void()>& action) {
  std::string error;
  const auto found = [&](const std::string& text) { return error.find(text) != error.npos; };
  for (int attempt = 0; attempt < 6 && std::none_of(texts.begin(), texts.end(), found); ++attempt) {
    error = ErrorOf<c10::Error>(action);
  }
  return error;
}

// Rank 1 does not get the other rank's values of one step.
void FailATransfer(bool overlap, Shard shard) {
  auto failing = std::make_shared<std::atomic<bool>>(false);
  const FakeCall::Kind kind =
      shard == Shard::kEven ? FakeCall::Kind::kAllGather : FakeCall::Kind::kBroadcast;
  RunThreadRanks(
      {.world_size = 3, .network = {.script = FailsOnce(failing, kind)}},
      [&](std::shared_ptr<ProcessGroup> group) {
        Trainer zero =
            Trainer::Zero(group, AdamW(), {.shard = shard, .overlap_with_forward = overlap});
        zero.Steps(0, 2);
        zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
        std::stringstream archive;
        torch::save(*zero.optimizer, archive);
        const at::Tensor values = testing::Flatten(zero.net->parameters());
        group->barrier();
        if (group->rank() == 1) *failing = true;
        EXPECT_THAT(Retry({"old and new"}, [&] { zero.Step(2); }),
                    HasSubstr("has interrupted a step"));
        {
          const at::NoGradGuard no_grad;
          EXPECT_THAT(ErrorOf<ReductionError>([&] { zero.model.forward(Inputs(0, 0)); }),
                      HasSubstr("has interrupted a step"));
        }
        EXPECT_THAT(ErrorOf<ReductionError>([&] { zero.optimizer->step(); }),
                    HasSubstr("load model and optimizer from a checkpoint"));
        EXPECT_FALSE(group->failed());
        torch::load(*zero.optimizer, archive);
        int64_t begin = 0;
        for (const at::Tensor& parameter : zero.net->parameters()) {
          const at::NoGradGuard no_grad;
          parameter.copy_(values.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
          begin += parameter.numel();
        }
        Trainer plain = Trainer::Plain(group, AdamW());
        plain.Steps(0, 4);
        zero.Steps(2, 4);
        ExpectEqual(plain, zero, "after a failure");
      });
}

// Rank 1 alone knows of the loss, and throws in a forward in which the others do not wait for it.
TEST(ZeroRedundancyFailureTest, AnInterruptedStepIsNamedUnderNoSync) {
  for (const bool overlap : {false, true}) {
    auto failing = std::make_shared<std::atomic<bool>>(false);
    RunThreadRanks(
        {.world_size = 3, .network = {.script = FailsOnce(failing, FakeCall::Kind::kAllGather)}},
        [&](std::shared_ptr<ProcessGroup> group) {
          Trainer zero = Trainer::Zero(group, AdamW(), {.overlap_with_forward = overlap});
          zero.Steps(0, 2);
          group->barrier();
          if (group->rank() == 1) *failing = true;
          const std::string error = Retry({"has interrupted a step"}, [&] {
            zero.optimizer->zero_grad();
            {
              const auto guard = zero.model.no_sync();
              zero.model.forward(Inputs(group->rank(), 2)).backward();
            }
            zero.Step(3);
          });
          EXPECT_THAT(error, HasSubstr("has interrupted a step"));
        });
  }
}

TEST(ZeroRedundancyFailureTest, AnInterruptedStepIsNamedOnEveryRank) {
  for (const Shard shard : {Shard::kEven, Shard::kWhole}) {
    FailATransfer(/*overlap=*/false, shard);
    FailATransfer(/*overlap=*/true, shard);
  }
}

void FailRank1(ProcessGroup& group) {
  group.barrier();
  if (group.rank() == 1) {
    group.report_failure("no more data");
  } else {
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group.barrier(); }), HasSubstr("no more data"));
  }
}

// A failure elsewhere, after the values have come, tears nothing.
THREAD_RANK_TEST(ZeroRedundancyFailureTest, CompleteTransfersOutliveAFailure, 2) {
  Trainer plain = Trainer::Plain(group, AdamW());
  plain.Steps(0, 3);
  Trainer zero = Trainer::Zero(group, AdamW(), {.overlap_with_forward = true});
  zero.Steps(0, 1);
  zero.Step(1);
  FailRank1(*group);
  zero.Steps(2, 3);  // in the next incarnation
  ExpectEqual(plain, zero, "after a failure");
}

// The first collective of an optimizer after a failure may be in a Join.
THREAD_RANK_TEST(ZeroRedundancyFailureTest, AJoinMayFollowAFailure, 2) {
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  const auto train = [&](Trainer& trainer) {
    join({&trainer.model, trainer.optimizer.get()}, {}, [&] {
      for (int step = 0; group->rank() == 0 && step < 3; ++step) trainer.Step(step);
    });
  };
  FailRank1(*group);
  group->renew();
  train(zero);
  train(plain);
  ExpectEqual(plain, zero, "in a Join after a failure");
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, TheModelCannotGoToAnotherGroup, 2) {
  Trainer zero = Trainer::Zero(group, AdamW(), {.shard = Shard::kWhole});
  const auto other = group->new_group({0, 1});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.model.update_process_group(other); }),
              HasSubstr("a ZeroRedundancyOptimizer over the model would stay on the old group"));
  EXPECT_FALSE(group->failed());
  zero.Steps(0, 2);
  zero.zero = nullptr;
  zero.optimizer.reset();
  zero.model.update_process_group(other);
}

// Rank 1 finds that it cannot add the group, while values are on their way.
THREAD_RANK_TEST(ZeroRedundancyFailureTest, AParameterGroupIsAddedOnAllRanksOrNone, 2) {
  Trainer zero = Trainer::Zero(group, AdamW(), {.overlap_with_forward = true});
  zero.Step(0);
  if (group->rank() == 1) zero.net->first.set_data(zero.net->first.detach().clone());
  EXPECT_THAT(
      ErrorOf<c10::Error>([&] { zero.zero->add_param_group(OptimizerParamGroup({Parameter()})); }),
      HasSubstr("rank 1: parameter 0 of a ZeroRedundancyOptimizer got other memory"));
  EXPECT_EQ(zero.optimizer->param_groups().size(), 2);
}

// Each collective of add_param_group() fails on rank 1 once: the ranks may then differ.
TEST(ZeroRedundancyFailureTest, AnInterruptedAddIsNamedOnEveryRank) {
  std::atomic<int> interrupted = 0;
  for (int number = 0; number < 6; ++number) {
    auto left = std::make_shared<std::atomic<int>>(-1);  // calls of rank 1 before the failing one
    const auto script = [left](const FakeCall& call) -> FakeFate {
      if (call.rank != 1 || *left < 0 || left->fetch_sub(1) > 0) return {};
      return {.error = "the wire broke"};
    };
    RunThreadRanks(
        {.world_size = 2, .network = {.script = script}}, [&](std::shared_ptr<ProcessGroup> group) {
          const at::Tensor parameter = Parameter();
          ZeroSgd zero(std::vector<at::Tensor>{parameter}, SGDOptions(0.1), group);
          parameter.mutable_grad() = torch::ones({4, 3});
          group->barrier();
          if (group->rank() == 1) *left = number;
          ErrorOf<c10::Error>([&] { zero.add_param_group(OptimizerParamGroup({Parameter()})); });
          if (group->rank() == 1) *left = -1;
          const std::string error = Retry({"no error", "interrupted add"}, [&] { zero.step(); });
          at::Tensor sizes = torch::zeros({2}, at::kLong);
          sizes[group->rank()] = static_cast<int64_t>(zero.param_groups().size());
          group->all_reduce(sizes);
          const bool equal = sizes[0].item<int64_t>() == sizes[1].item<int64_t>();
          EXPECT_THAT(error, HasSubstr(equal ? "no error" : "interrupted add_param_group()"))
              << number << " " << sizes;
          if (!equal) ++interrupted;
        });
  }
  EXPECT_GT(interrupted, 0);
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, ScatterNeedsAModelBeforeItsFirstBackward, 2) {
  Trainer trainer(group);
  trainer.model.forward(Inputs(group->rank(), 0)).backward();
  const auto make = [&](std::optional<bool> scatter) {
    ZeroRedundancyOptimizerBase zero(AdamW(), GroupsOf(*trainer.net, AdamW()), trainer.model,
                                     {.scatter_gradients = scatter});
    return zero.scatters_gradients();
  };
  EXPECT_FALSE(make({}));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { make(true); }),
              HasSubstr("a model before its first backward"));
  EXPECT_FALSE(group->failed());
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, TwoSynchronizedBackwardsAreRefused, 2) {
  Trainer zero = Trainer::Zero(group, AdamW(), {.scatter_gradients = true});
  zero.Steps(0, 2);
  zero.optimizer->zero_grad(/*set_to_none=*/false);
  zero.model.forward(Inputs(group->rank(), 2)).backward();
  EXPECT_THAT(
      ErrorOf<ReductionError>([&] { zero.model.forward(Inputs(group->rank(), 3)).backward(); }),
      AllOf(HasSubstr("run every backward except the last under no_sync()"),
            HasSubstr("call zero_grad()")));
  // A backward whose gradients are dropped is no mistake.
  std::string error = "not tried";
  for (int attempt = 0; attempt < 3 && error != "no error"; ++attempt) {
    error = ErrorOf<c10::Error>([&] {
      zero.optimizer->zero_grad();
      const at::Tensor loss = zero.model.forward(Inputs(group->rank(), 2));
      loss.backward();
      zero.optimizer->zero_grad();
      zero.Step(2);
    });
  }
  EXPECT_EQ(error, "no error");
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, ValuesOnTheirWayAreWaitedFor, 2) {
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {.overlap_with_forward = true});
  plain.Steps(0, 1);
  zero.Step(0);
  const auto equal = [&] { return at::equal(plain.net->first, zero.net->first); };
  EXPECT_FALSE(equal());
  {
    const at::NoGradGuard no_grad;  // one rank may evaluate alone
    if (group->rank() == 0) {
      zero.model.forward(Inputs(0, 1));
      EXPECT_TRUE(equal());
    }
  }
  zero.zero->wait();
  EXPECT_TRUE(equal());
  zero.zero->wait();

  zero.Step(1);
  if (group->rank() == 1) zero.net->first.set_data(zero.net->first.detach().clone());
  if (group->rank() == 0) {
    zero.zero->wait();
  } else {
    EXPECT_THAT(ErrorOf<ReductionError>([&] { zero.zero->wait(); }),
                HasSubstr("rank 1: parameter 0 of a ZeroRedundancyOptimizer got other memory"));
  }
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, TheDestructorWaits, 2) {
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {.overlap_with_forward = true});
  plain.Step(0);
  zero.Step(0);
  zero.zero = nullptr;
  zero.optimizer.reset();
  ExpectEqual(plain, zero, "after the end of the optimizer");
}

// Other buckets than the optimizer's are all-reduced.
THREAD_RANK_TEST(ZeroRedundancyFailureTest, TheModelMayGetOtherBuckets, 3) {
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {.scatter_gradients = true});
  zero.model.set_bucket_layout(plain.model.bucket_layout());
  plain.Steps(0, 3);
  zero.Steps(0, 3);
  ExpectEqual(plain, zero, "in other buckets");
  zero.model.forward(Inputs(group->rank(), 3)).backward();  // adds to averages
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, TheModelMayLiveLonger, 2) {
  Trainer zero = Trainer::Zero(group, AdamW(), {.scatter_gradients = true});
  zero.Steps(0, 2);
  zero.zero = nullptr;
  zero.optimizer.reset();
  Trainer plain = Trainer::Plain(group, AdamW());
  plain.Steps(0, 2);
  for (Trainer* const trainer : {&zero, &plain}) {
    trainer->net->zero_grad();
    trainer->model.forward(Inputs(group->rank(), 3)).backward();
    trainer->model.forward(Inputs(group->rank(), 4)).backward();
  }
  EXPECT_TRUE(at::equal(testing::Gradients(*plain.net), testing::Gradients(*zero.net)));
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AStateThatCannotBeSavedIsReported, 2) {
  const bool broken = group->rank() == 1;
  ZeroRedundancyOptimizerBase zero(
      [broken](Groups groups) { return std::make_unique<Unsaved>(groups, broken); },
      {OptimizerParamGroup({Parameter()})}, group);
  zero.step();
  EXPECT_THAT(ErrorOf<std::exception>([&] { zero.consolidate_state_dict(0); }),
              HasSubstr("the state is lost"));
}

THREAD_RANK_TEST(ZeroRedundancyFailureTest, AStateThatCannotBeDescribedIsReported, 2) {
  const bool broken = group->rank() == 1;
  ZeroRedundancyOptimizerBase zero(
      [broken](Groups groups) { return std::make_unique<Unsaved>(groups, broken); },
      {OptimizerParamGroup({Parameter()})}, group);
  zero.step();
  EXPECT_THAT(ErrorOf<std::exception>([&] { zero.DescribeState(); }),
              HasSubstr("the state is lost"));
}

// A collection for a checkpoint fails on rank 1. Another one and further steps are possible.
TEST(ZeroRedundancyFailureTest, AnInterruptedCollectionTearsNothing) {
  auto failing = std::make_shared<std::atomic<bool>>(false);
  RunThreadRanks(
      {.world_size = 3, .network = {.script = FailsOnce(failing, FakeCall::Kind::kBroadcast)}},
      [&](std::shared_ptr<ProcessGroup> group) {
        Trainer zero = Trainer::Zero(group, AdamW(), {});
        zero.Steps(0, 2);
        const std::vector<bool> all(zero.net->parameters().size(), true);
        const auto interrupted = zero.zero->DescribeState();
        group->barrier();
        if (group->rank() == 1) *failing = true;
        EXPECT_NE(ErrorOf<c10::Error>([&] { zero.zero->FillState(*interrupted, all); }),
                  "no error");
        group->renew();
        const auto whole = zero.zero->DescribeState();
        zero.zero->FillState(*whole, all);
        Trainer plain = Trainer::Plain(group, AdamW());
        plain.Steps(0, 2);
        ASSERT_EQ(whole->state().size(), plain.optimizer->state().size());
        const auto exp_avg = [](const torch::optim::Optimizer& optimizer, const at::Tensor& of) {
          return static_cast<const torch::optim::AdamWParamState&>(
                     *optimizer.state().at(of.unsafeGetTensorImpl()))
              .exp_avg();
        };
        EXPECT_TRUE(at::equal(exp_avg(*whole, zero.net->first),
                              exp_avg(*plain.optimizer, plain.net->first)));
        plain.Steps(2, 4);
        zero.Steps(2, 4);
        ExpectEqual(plain, zero, "after an interrupted collection");
      });
}

// A state is sent in rounds of at most 64 MiB.
TEST(ZeroRedundancyFailureTest, LongTextsAreSentInRounds) {
  constexpr int64_t kLimit = int64_t{64} << 20;
  auto longest = std::make_shared<std::atomic<int64_t>>(0);
  const auto script = [longest](const FakeCall& call) -> FakeFate {
    int64_t known = *longest;
    while (call.bytes > known && !longest->compare_exchange_weak(known, call.bytes)) continue;
    return {};
  };
  RunThreadRanks({.world_size = 2, .network = {.script = script}},
                 [&](std::shared_ptr<ProcessGroup> group) {
                   const std::string mine(kLimit + 5, static_cast<char>('a' + group->rank()));
                   const auto texts = internal::CollectTexts(*group, mine, 1);
                   for (int rank = 0; rank < 2; ++rank) {
                     const std::string expected(kLimit + 5, static_cast<char>('a' + rank));
                     EXPECT_TRUE(group->rank() == 0 || texts[rank] == expected);
                   }
                   group->barrier();
                 });
  EXPECT_EQ(*longest, kLimit);
}

}  // namespace
}  // namespace ddp
