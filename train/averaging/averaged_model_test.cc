#include "train/averaging/averaged_model.h"

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "ddp/common/error.h"
#include "ddp/common/stateful.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::train {
namespace {

using ::testing::HasSubstr;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm1dOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

std::string ErrorOf(const std::function<void()>& action) {
  return ddp::testing::ErrorOf<ConfigurationError>(action);
}

void Fill(const torch::Tensor& tensor, double value) {
  const torch::NoGradGuard no_grad;
  tensor.fill_(value);
}

float First(const torch::Tensor& tensor) { return tensor.flatten()[0].item<float>(); }

// Feeds the values to the model's weight, and returns that of the average after each update.
template <typename Average>
std::vector<float> Follow(Average& average, Linear& model, const std::vector<double>& values) {
  std::vector<float> followed;
  for (const double value : values) {
    Fill(model->weight, value);
    average.update_parameters(*model);
    followed.push_back(First(average.module()->weight));
  }
  return followed;
}

TEST(AveragedModelTest, TheMeanOfAllUpdates) {
  Linear model(2, 3);
  AveragedModel average(*model);
  EXPECT_THAT(Follow(average, model, {3, 6, 0}), ::testing::ElementsAre(3, 4.5, 3));
  EXPECT_EQ(average.n_averaged(), 3);
  EXPECT_EQ(First(model->weight), 0);
}

TEST(AveragedModelTest, AnExponentialAverage) {
  Linear model(2, 3);
  AveragedModel average(*model, {.ema_decay = 0.75});
  EXPECT_THAT(Follow(average, model, {4, 8, 1}), ::testing::ElementsAre(4, 5, 4));
}

TEST(AveragedModelTest, AnAverageOfTheProgram) {
  Linear model(2, 3);
  AveragedModel largest(
      *model, {.avg_fn = [](const torch::Tensor& average, const torch::Tensor& current, int64_t) {
        return torch::maximum(average, current);
      }});
  EXPECT_THAT(Follow(largest, model, {1, 3, 2}), ::testing::ElementsAre(1, 3, 3));
}

TEST(AveragedModelTest, ForwardIsThatOfTheAverage) {
  Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  AveragedModel average(*model);
  Follow(average, model, {2, 4});
  EXPECT_EQ(First(average.forward(torch::ones({1, 1}))), 3);
}

TEST(AveragedModelTest, BuffersAreCopiedOrAveraged) {
  BatchNorm1d model(2);
  AveragedModel copies(*model);
  AveragedModel averages(*model, {.use_buffers = true});
  for (const double value : {2, 4}) {
    Fill(model->running_mean, value);
    model->num_batches_tracked.fill_(static_cast<int64_t>(value));
    copies.update_parameters(*model);
    averages.update_parameters(*model);
  }
  EXPECT_EQ(First(copies.module()->running_mean), 4);
  EXPECT_EQ(First(averages.module()->running_mean), 3);
  EXPECT_EQ(averages.module()->num_batches_tracked.item<int64_t>(), 4);
}

TEST(AveragedModelTest, AStateGoesOnWhereItWasSaved) {
  Linear model(2, 3);
  AveragedModel saving(*model);
  Follow(saving, model, {3, 6});
  AveragedModel loading(*model);
  loading.load_state(saving.save_state());
  EXPECT_EQ(loading.n_averaged(), 2);
  EXPECT_THAT(Follow(loading, model, {0}), ::testing::ElementsAre(3));

  SavedState state = saving.save_state();
  state.tensors["module/weight"] = torch::zeros({7});
  EXPECT_THAT(ErrorOf([&] { loading.load_state(state); }),
              HasSubstr("\"module/weight\" has another shape"));
  state.tensors.erase("module/weight");
  EXPECT_THAT(ErrorOf([&] { loading.load_state(state); }), HasSubstr("no tensor"));
  EXPECT_EQ(loading.n_averaged(), 3);
}

TEST(AveragedModelTest, MistakesAreNamed) {
  Linear model(2, 3);
  AveragedModel average(*model);
  EXPECT_THAT(ErrorOf([&] { average.update_parameters(*Linear(2, 4)); }),
              HasSubstr("no parameter \"weight\" of the average's shape"));
  Linear without_bias(torch::nn::LinearOptions(2, 3).bias(false));
  EXPECT_THAT(ErrorOf([&] { AveragedModel(*without_bias).update_parameters(*model); }),
              HasSubstr("the model has 2 parameters and the average 1"));
  EXPECT_THAT(ErrorOf([&] { AveragedModel(*model, {.ema_decay = 1.5}); }),
              HasSubstr("ema_decay is 1.500000"));
  EXPECT_EQ(average.n_averaged(), 0);
}

// Batch i has the mean 2 * i, and the variance that torch::var gives.
torch::Tensor Batch(int i) { return torch::linspace(-1.0 - i, 1.0 + i, 8).view({4, 2}) + 2 * i; }

// Returns a forward_next over the batches from `begin`, every `step`-th, before `end`.
std::function<bool()> Batches(Sequential& model, int begin, int end, int step = 1) {
  return [&model, begin, end, step, next = begin]() mutable {
    if (next >= end) return false;
    model->forward(Batch(next).to(model->parameters()[0].device()));
    next += step;
    return true;
  };
}

TEST(UpdateBnTest, StatisticsAreTheMeanOverTheBatches) {
  Sequential model(BatchNorm1d(BatchNorm1dOptions(2).momentum(0.3)));
  auto& layer = *model[0]->as<BatchNorm1d>();
  model->forward(Batch(7));
  model->eval();
  update_bn(*model, Batches(model, 0, 3));
  torch::Tensor mean = torch::zeros({2});
  torch::Tensor variance = torch::zeros({2});
  for (int i = 0; i < 3; ++i) {
    mean += Batch(i).mean(0) / 3;
    variance += Batch(i).var(0) / 3;
  }
  EXPECT_TRUE(torch::allclose(layer.running_mean, mean));
  EXPECT_TRUE(torch::allclose(layer.running_var, variance));
  EXPECT_EQ(layer.options.momentum(), 0.3);
  EXPECT_FALSE(model->is_training());
}

TEST(UpdateBnTest, ModeAndMomentumComeBackAfterAnException) {
  Sequential model(BatchNorm1d(2));
  model->eval();
  EXPECT_THROW(update_bn(*model, []() -> bool { throw std::runtime_error("no file"); }),
               std::runtime_error);
  EXPECT_FALSE(model->is_training());
  EXPECT_EQ(model[0]->as<BatchNorm1d>()->options.momentum(), 0.1);
}

// Rank 0 has batches 0, 2 and 4, rank 1 batches 1 and 3, rank 2 none.
RANK_TEST(UpdateBnTest, StatisticsAreOverTheBatchesOfAllRanks, 3) {
  const auto group = init_process_group();
  Sequential alone(BatchNorm1d(2));
  Sequential shared(BatchNorm1d(2));
  for (Sequential* model : {&alone, &shared}) (*model)->to(group->device());
  update_bn(*alone, Batches(alone, 0, 5));
  update_bn(*shared, Batches(shared, group->rank(), group->rank() == 2 ? 0 : 5, 2), group);
  const auto& expected = *alone[0]->as<BatchNorm1d>();
  const auto& layer = *shared[0]->as<BatchNorm1d>();
  EXPECT_TRUE(torch::allclose(layer.running_mean, expected.running_mean));
  EXPECT_TRUE(torch::allclose(layer.running_var, expected.running_var));
  EXPECT_EQ(layer.num_batches_tracked.item<int64_t>(), 5);
}

RANK_TEST(AveragedModelTest, TheMeanIsEqualOnAllRanks, 2) {
  const auto group = init_process_group();
  Linear model(2, 3);
  model->to(group->device());
  AveragedModel average(*model);
  EXPECT_THAT(Follow(average, model, {3, 6, 0}), ::testing::ElementsAre(3, 4.5, 3));
  const torch::Tensor sum = average.module()->weight.detach().clone();
  group->all_reduce(sum);
  EXPECT_EQ(First(sum), 6);
}

}  // namespace
}  // namespace ddp::train
