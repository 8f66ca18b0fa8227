// Golden values are PyTorch 2.15's, as hexadecimal floats: equal to the bit. testing/oracle/ has
// every scheduler over 200 steps.
#include "train/schedulers/schedulers.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "train/schedulers/composed_schedulers.h"
#include "train/schedulers/cycle_schedulers.h"

namespace ddp::train {
namespace {

using ::testing::ElementsAre;
using testing::ErrorOf;
using ::testing::HasSubstr;

std::string ConfigurationErrorOf(const std::function<void()>& action) {
  return ErrorOf<ConfigurationError>(action);
}

torch::optim::SGD NewSgd(double rate) {
  return torch::optim::SGD({torch::zeros({1})}, torch::optim::SGDOptions(rate).momentum(0.9));
}

// Two parameter groups, with rates 0.5 and 0.25.
torch::optim::SGD TwoGroups() {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : {0.5, 0.25}) {
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({1})},
                        std::make_unique<torch::optim::SGDOptions>(rate));
  }
  return torch::optim::SGD(groups, torch::optim::SGDOptions(0.5));
}

// Returns the rate of the first group at each of the first steps.
std::vector<double> Rates(LRScheduler& scheduler, int steps) {
  std::vector<double> rates = {scheduler.get_last_lr()[0]};
  while (rates.size() < steps) {
    scheduler.step();
    rates.push_back(scheduler.get_last_lr()[0]);
  }
  return rates;
}

TEST(SchedulersTest, LinearMultipliesTheCurrentRate) {
  auto optimizer = NewSgd(0.1);
  LinearLR scheduler(optimizer, {.start_factor = 1.0 / 3, .total_iters = 4});
  EXPECT_THAT(Rates(scheduler, 6),
              ElementsAre(0x1.1111111111111p-5, 0x1.999999999999ap-5, 0x1.1111111111112p-4,
                          0x1.5555555555556p-4, 0x1.999999999999ap-4, 0x1.999999999999ap-4));
}

TEST(SchedulersTest, CosineComesBackFromTheLowestRate) {
  auto optimizer = NewSgd(0.1);
  CosineAnnealingLR scheduler(optimizer, {.t_max = 3, .eta_min = 0.01});
  EXPECT_THAT(Rates(scheduler, 7),
              ElementsAre(0x1.999999999999ap-4, 0x1.3d70a3d70a3d7p-4, 0x1.0a3d70a3d70a6p-5,
                          0x1.47ae147ae147bp-7, 0x1.0a3d70a3d70a4p-5, 0x1.3d70a3d70a3dbp-4,
                          0x1.999999999999fp-4));
}

TEST(SchedulersTest, WarmRestartsTakeAPointBetweenSteps) {
  auto optimizer = NewSgd(0.1);
  CosineAnnealingWarmRestarts scheduler(optimizer, {.t_0 = 2, .t_mult = 2});
  EXPECT_EQ(scheduler.get_last_lr()[0], 0.1);
  std::vector<double> rates;
  for (const double epoch : {0.5, 1.75, 2.0, 5.5, 6.25}) {
    scheduler.step(epoch);
    rates.push_back(scheduler.get_last_lr()[0]);
  }
  EXPECT_THAT(rates, ElementsAre(0x1.5d9d8f5cc7e52p-4, 0x1.f2dcf3d78efb4p-9, 0x1.999999999999ap-4,
                                 0x1.f2dcf3d78efb4p-9, 0x1.989d24186dba9p-4));
  EXPECT_EQ(scheduler.last_epoch(), 6);
}

TEST(SchedulersTest, OneCycleChangesBetasAgainstTheRate) {
  torch::optim::Adam optimizer({torch::zeros({1})}, torch::optim::AdamOptions(1.0));
  OneCycleLR scheduler(optimizer, {.max_lr = {0.1}, .total_steps = 5});
  EXPECT_THAT(Rates(scheduler, 6),
              ElementsAre(0x1.0624dd2f1aap-8, 0x1.8551898fc1ee6p-4, 0x1.f4beefeb35d1bp-5,
                          0x1.347145fcb3ed5p-6, 0x1.ad7f29abcaf48p-22, 0x1.347145fcb3ed2p-6));
  EXPECT_EQ(scheduler.optimizer().momenta()[0], 0x1.dcc2e71ba324ap-1);
  EXPECT_THAT(ConfigurationErrorOf([&] { scheduler.step(); }), HasSubstr("total_steps = 5"));
}

TEST(SchedulersTest, AWarmUpEndsInTheNextSchedule) {
  auto optimizer = NewSgd(0.1);
  ScheduledOptimizer target(optimizer);
  const auto scheduler = warmup_then(target, {.steps = 3, .start_factor = 0.25},
                                     std::make_shared<ExponentialLR>(target, 0.5));
  EXPECT_THAT(Rates(*scheduler, 6),
              ElementsAre(0x1.999999999999ap-6, 0x1.999999999999ap-5, 0x1.3333333333334p-4,
                          0x1.999999999999ap-4, 0x1.999999999999ap-5, 0x1.999999999999ap-6));
}

TEST(SchedulersTest, AConstantWarmUpKeepsItsFactor) {
  auto optimizer = NewSgd(0.5);
  ScheduledOptimizer target(optimizer);
  const auto scheduler = warmup_then(
      target, {.steps = 2, .start_factor = 0.25, .kind = WarmupOptions::Kind::kConstant},
      std::make_shared<StepLR>(target, StepLROptions{.step_size = 1, .gamma = 0.5}));
  EXPECT_THAT(Rates(*scheduler, 5), ElementsAre(0.125, 0.125, 0.5, 0.25, 0.125));
}

TEST(SchedulersTest, EachGroupHasItsRate) {
  auto optimizer = TwoGroups();
  MultiStepLR scheduler(optimizer, {.milestones = {1, 3, 3}, .gamma = 0.5});
  EXPECT_THAT(scheduler.get_last_lr(), ElementsAre(0.5, 0.25));
  for (int i = 0; i < 3; ++i) scheduler.step();
  EXPECT_THAT(scheduler.get_last_lr(), ElementsAre(0.0625, 0.03125));
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.03125);
}

TEST(SchedulersTest, LambdasAreOfTheirGroup) {
  auto optimizer = TwoGroups();
  LambdaLR scheduler(optimizer, {[](int64_t epoch) { return 1.0 / (1 + epoch); },
                                 [](int64_t epoch) { return 1.0 + epoch; }});
  scheduler.step();
  EXPECT_THAT(scheduler.get_last_lr(), ElementsAre(0.25, 0.5));
}

TEST(SchedulersTest, ARateThatTheProgramSetsStaysInEffect) {
  auto optimizer = NewSgd(0.5);
  StepLR scheduler(optimizer, {.step_size = 2, .gamma = 0.5});
  optimizer.param_groups()[0].options().set_lr(8);
  EXPECT_THAT(Rates(scheduler, 3), ElementsAre(0.5, 8, 4));
}

// The state is loaded into a new scheduler over a new optimizer, which has another rate.
TEST(SchedulersTest, AStateGoesOnWhereItWasSaved) {
  auto optimizer = NewSgd(0.1);
  ScheduledOptimizer target(optimizer);
  const auto cosine = [](const ScheduledOptimizer& over) {
    return std::make_shared<CosineAnnealingLR>(over, CosineAnnealingLROptions{.t_max = 7});
  };
  const auto saving = warmup_then(target, {.steps = 3}, cosine(target));
  for (int i = 0; i < 6; ++i) saving->step();
  const SavedState state = saving->save_state();

  auto fresh = NewSgd(0.7);
  ScheduledOptimizer fresh_target(fresh);
  const auto loading = warmup_then(fresh_target, {.steps = 3}, cosine(fresh_target));
  loading->load_state(state);
  EXPECT_EQ(loading->last_epoch(), 6);
  EXPECT_EQ(loading->get_last_lr(), saving->get_last_lr());
  EXPECT_EQ(Rates(*loading, 20), Rates(*saving, 20));
  EXPECT_EQ(fresh.param_groups()[0].options().get_lr(),
            optimizer.param_groups()[0].options().get_lr());
}

TEST(SchedulersTest, AStateOfAnotherSchedulerIsRefused) {
  auto optimizer = NewSgd(0.1);
  ExponentialLR saving(optimizer, 0.5);
  StepLR loading(optimizer, {.step_size = 2});
  SavedState state = saving.save_state();
  EXPECT_EQ(ConfigurationErrorOf([&] { loading.load_state(state); }),
            "the saved state is of a ExponentialLR, the scheduler is a StepLR; make the scheduler "
            "that saved it");
  state = loading.save_state();
  state.values.erase("base_lrs");
  state.values["last_epoch"] = int64_t{9};
  EXPECT_THAT(ConfigurationErrorOf([&] { loading.load_state(state); }),
              HasSubstr("no value \"base_lrs\""));
  EXPECT_EQ(loading.last_epoch(), 0);
}

TEST(SchedulersTest, ChainedSchedulersMultiply) {
  auto optimizer = NewSgd(1.0);
  ScheduledOptimizer target(optimizer);
  ChainedScheduler scheduler(
      target,
      {std::make_shared<ConstantLR>(target, ConstantLROptions{.factor = 0.5, .total_iters = 2}),
       std::make_shared<ExponentialLR>(target, 0.5)});
  EXPECT_THAT(Rates(scheduler, 4), ElementsAre(0.5, 0.25, 0.25, 0.125));
}

TEST(SchedulersTest, AParameterGroupThatIsAddedLaterIsNamed) {
  auto optimizer = NewSgd(0.1);
  ExponentialLR scheduler(optimizer, 0.5);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({1})}));
  EXPECT_THAT(ConfigurationErrorOf([&] { scheduler.step(); }),
              HasSubstr("ExponentialLR: the optimizer has got a parameter group"));
}

TEST(SchedulersTest, SchedulersOfOneSequenceShareTheirOptimizer) {
  auto optimizer = NewSgd(0.1);
  const auto first = std::make_shared<ExponentialLR>(optimizer, 0.5);
  const auto second = std::make_shared<ExponentialLR>(optimizer, 0.5);
  EXPECT_THAT(ConfigurationErrorOf([&] {
                SequentialLR(first->optimizer(), {first, second}, {3});
              }),
              HasSubstr("SequentialLR: scheduler 1 was made over another ScheduledOptimizer"));
  EXPECT_THAT(ConfigurationErrorOf([&] { ChainedScheduler(optimizer, {first}); }),
              HasSubstr("ChainedScheduler: scheduler 0 was made over another"));
}

TEST(SchedulersTest, OptionsOutOfRangeAreNamed) {
  auto sgd = NewSgd(0.1);
  torch::optim::Adagrad adagrad({torch::zeros({1})}, torch::optim::AdagradOptions(0.1));
  ScheduledOptimizer target(sgd);
  const auto step = std::make_shared<ExponentialLR>(target, 0.5);
  const auto chain =
      std::make_shared<ChainedScheduler>(target, std::vector<std::shared_ptr<LRScheduler>>{step});
  const std::vector<std::pair<std::string, std::function<void()>>> cases = {
      {"step_size is 0", [&] { StepLR(sgd, {}); }},
      {"factor is 0.0", [&] { ConstantLR(sgd, {.factor = 0}); }},
      {"total_iters is negative", [&] { ConstantLR(sgd, {.total_iters = -1}); }},
      {"start_factor is 2.0", [&] { LinearLR(sgd, {.start_factor = 2}); }},
      {"end_factor is -1.0", [&] { LinearLR(sgd, {.end_factor = -1}); }},
      {"total_iters is 0", [&] { LinearLR(sgd, {.total_iters = 0}); }},
      {"total_iters is 0", [&] { PolynomialLR(sgd, {.total_iters = 0}); }},
      {"power is -1.0", [&] { PolynomialLR(sgd, {.power = -1}); }},
      {"t_max is 0", [&] { CosineAnnealingLR(sgd, {}); }},
      {"t_0 is 0", [&] { CosineAnnealingWarmRestarts(sgd, {}); }},
      {"t_mult is 0", [&] { CosineAnnealingWarmRestarts(sgd, {.t_0 = 1, .t_mult = 0}); }},
      {"1 functions and 2 parameter groups",
       [&] {
         auto two = TwoGroups();
         LambdaLR(two, std::vector<LRLambda>{[](int64_t) { return 1.0; }});
       }},
      {"a function is empty", [&] { MultiplicativeLR(sgd, LRLambda()); }},
      {"give total_steps", [&] { OneCycleLR(sgd, {.max_lr = {1}, .epochs = 2}); }},
      {"pct_start is 1.5",
       [&] { OneCycleLR(sgd, {.max_lr = {1}, .total_steps = 9, .pct_start = 1.5}); }},
      {"a part of the cycle has no step",
       [&] { OneCycleLR(sgd, {.max_lr = {1}, .total_steps = 2, .pct_start = 0.5}); }},
      {"max_lr has 0 values", [&] { OneCycleLR(sgd, {.total_steps = 9}); }},
      {"neither a momentum nor betas",
       [&] { OneCycleLR(adagrad, {.max_lr = {1}, .total_steps = 9}); }},
      {"step_size_up must be",
       [&] { CyclicLR(sgd, {.base_lr = {1}, .max_lr = {2}, .step_size_up = 0}); }},
      {"max_lr has 2 values",
       [&] {
         CyclicLR(sgd, {.base_lr = {1}, .max_lr = {2, 3}});
       }},
      {"neither a momentum nor betas", [&] { CyclicLR(adagrad, {.base_lr = {1}, .max_lr = {2}}); }},
      {"swa_lr has 0 values", [&] { SWALR(sgd, {}); }},
      {"anneal_epochs is negative", [&] { SWALR(sgd, {.swa_lr = {1}, .anneal_epochs = -1}); }},
      {"there is no scheduler", [&] { SequentialLR(target, {}, {}); }},
      {"scheduler 1 is null",
       [&] {
         SequentialLR(target, {step, nullptr}, {1});
       }},
      {"2 schedulers and 0 milestones",
       [&] {
         SequentialLR(target, {step, step}, {});
       }},
      {"not in ascending order",
       [&] {
         SequentialLR(target, {step, step, step}, {2, 1});
       }},
      {"only the first may be",
       [&] {
         SequentialLR(target, {step, chain}, {1});
       }},
      {"steps is 0", [&] { warmup_then(target, {}, step); }},
  };
  for (const auto& [text, action] : cases) {
    const std::string error = ConfigurationErrorOf(action);
    EXPECT_THAT(error, HasSubstr(text));
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace ddp::train
