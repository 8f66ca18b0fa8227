#include "train/schedulers/reduce_lr_on_plateau.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

torch::optim::SGD NewSgd() {
  return torch::optim::SGD({torch::zeros({1})}, torch::optim::SGDOptions(1.0));
}

std::vector<double> Rates(ReduceLROnPlateau& scheduler, const std::vector<double>& metrics) {
  std::vector<double> rates;
  for (const double metric : metrics) {
    scheduler.step(metric);
    rates.push_back(scheduler.get_last_lr()[0]);
  }
  return rates;
}

TEST(ReduceLROnPlateauTest, ReducesAfterPatience) {
  auto optimizer = NewSgd();
  ReduceLROnPlateau scheduler(optimizer, {.factor = 0.5, .patience = 1, .min_lr = {0.25}});
  EXPECT_THAT(Rates(scheduler, {3, 2, 2, 2, 2, 2, 2, 2}),
              ElementsAre(1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25));
  EXPECT_EQ(scheduler.best(), 2);
}

TEST(ReduceLROnPlateauTest, CooldownCountsNothing) {
  auto optimizer = NewSgd();
  ReduceLROnPlateau scheduler(optimizer, {.factor = 0.5, .patience = 0, .cooldown = 2});
  EXPECT_THAT(Rates(scheduler, {2, 2, 2, 2, 2}), ElementsAre(1, 0.5, 0.5, 0.5, 0.25));
}

TEST(ReduceLROnPlateauTest, NanIsNoImprovement) {
  auto optimizer = NewSgd();
  ReduceLROnPlateau scheduler(optimizer, {.factor = 0.5, .patience = 1});
  const double nan = std::nan("");
  EXPECT_THAT(Rates(scheduler, {2, nan, nan}), ElementsAre(1, 1, 0.5));
}

TEST(ReduceLROnPlateauTest, AStateKeepsTheBestAndTheCounts) {
  auto optimizer = NewSgd();
  const ReduceLROnPlateauOptions options = {
      .mode = ReduceLROnPlateauOptions::Mode::kMax, .factor = 0.5, .patience = 2};
  ReduceLROnPlateau saving(optimizer, options);
  const SavedState unused = saving.save_state();
  saving.step(5);
  saving.step(4);
  saving.step(4);
  const SavedState state = saving.save_state();

  auto fresh = NewSgd();
  ReduceLROnPlateau loading(fresh, options);
  loading.load_state(unused);
  EXPECT_EQ(loading.best(), -std::numeric_limits<double>::infinity());
  loading.load_state(state);
  EXPECT_EQ(loading.best(), 5);
  EXPECT_EQ(loading.num_bad_epochs(), 2);
  EXPECT_THAT(Rates(loading, {4}), ElementsAre(0.5));
}

TEST(ReduceLROnPlateauTest, WrongOptionsAreNamed) {
  auto optimizer = NewSgd();
  const auto error_of = [&](const ReduceLROnPlateauOptions& options) {
    return ddp::testing::ErrorOf<ConfigurationError>(
        [&] { ReduceLROnPlateau(optimizer, options); });
  };
  EXPECT_THAT(error_of({.factor = 1}), HasSubstr("factor is 1.000000, it must be less than 1"));
  EXPECT_THAT(error_of({.min_lr = {1, 2}}), HasSubstr("min_lr has 2 values"));
}

// Rank 1's metric gets worse, and the mean does; rank 0 alone would never reduce.
RANK_TEST(ReduceLROnPlateauTest, RanksDecideByTheMean, 2) {
  const auto group = init_process_group();
  auto optimizer = NewSgd();
  ReduceLROnPlateau scheduler(optimizer, {.factor = 0.5, .patience = 0, .group = group});
  scheduler.step(4);
  EXPECT_EQ(scheduler.best(), 4);
  scheduler.step(group->rank() == 0 ? 3 : 7);
  EXPECT_EQ(scheduler.get_last_lr()[0], 0.5);
  scheduler.step(group->rank() == 0 ? 4 : 1);
  EXPECT_EQ(scheduler.best(), 2.5);
  EXPECT_EQ(scheduler.get_last_lr()[0], 0.5);
  scheduler.step(group->rank() == 1 ? std::nan("") : 0);
  EXPECT_EQ(scheduler.get_last_lr()[0], 0.25);
}

}  // namespace
}  // namespace ddp::train
