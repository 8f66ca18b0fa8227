// Golden values are PyTorch 2.15's.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "ddp/common/error.h"
#include "ddp/common/stateful.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"
#include "train/gradients/clip_grad.h"
#include "train/gradients/grad_scaler.h"

namespace ddp::train {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;
using Tensors = std::vector<torch::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string ErrorOf(const std::function<void()>& action) {
  return ddp::testing::ErrorOf<ConfigurationError>(action);
}

// A matrix and a vector with gradients from -2 to 3, and a parameter without a gradient.
Tensors Parameters() {
  Tensors parameters = {torch::zeros({3, 4}), torch::zeros({5}), torch::zeros({2})};
  parameters[0].mutable_grad() = torch::linspace(-2, 3, 12).view({3, 4});
  parameters[1].mutable_grad() = torch::linspace(-2, 3, 5);
  return parameters;
}

float NormOf(const Tensors& parameters, double norm_type) {
  return get_total_norm(parameters, {.norm_type = norm_type}).item<float>();
}

TEST(ClipGradTest, NormsArePyTorchs) {
  const Tensors parameters = Parameters();
  EXPECT_THAT(NormOf(parameters, 1), FloatEq(24.909090042114258F));
  EXPECT_THAT(NormOf(parameters, 2), FloatEq(7.02996826171875F));
  EXPECT_THAT(NormOf(parameters, 3), FloatEq(4.8378777503967285F));
  EXPECT_EQ(NormOf(parameters, kInfinity), 3);
}

TEST(ClipGradTest, ClipsToTheNorm) {
  for (const double norm_type : {1.0, 2.0, kInfinity}) {
    Tensors parameters = Parameters();
    const float before = NormOf(parameters, norm_type);
    const torch::Tensor returned = clip_grad_norm_(parameters, 0.5, {.norm_type = norm_type});
    EXPECT_EQ(returned.item<float>(), before);
    EXPECT_NEAR(NormOf(parameters, norm_type), 0.5, 1e-6);
  }
}

TEST(ClipGradTest, SmallGradientsStay) {
  const Tensors parameters = Parameters();
  clip_grad_norm_(parameters, 100);
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::linspace(-2, 3, 5)));
  EXPECT_EQ(clip_grad_norm_({torch::zeros({2})}, 1).item<float>(), 0);
}

TEST(ClipGradTest, TypesMayDiffer) {
  Tensors parameters = Parameters();
  parameters[2] = torch::zeros({2}, torch::kFloat64);
  parameters[2].mutable_grad() = torch::ones({2}, torch::kFloat64) * 3;
  const double before = clip_grad_norm_(parameters, 1).item<double>();
  EXPECT_NEAR(before, std::sqrt(7.02996826171875 * 7.02996826171875 + 18), 1e-5);
  EXPECT_NEAR(parameters[2].grad()[0].item<double>(), 3 / before, 1e-5);
}

TEST(ClipGradTest, ANormThatIsNotFiniteIsAnErrorOnRequest) {
  const Tensors parameters = Parameters();
  parameters[1].grad()[2] = std::nan("");
  const std::string error = ddp::testing::ErrorOf<NonFiniteGradientError>(
      [&] { clip_grad_norm_(parameters, 1, {.error_if_nonfinite = true}); });
  EXPECT_THAT(error, HasSubstr("of the gradients is nan, so they cannot be clipped"));
  EXPECT_EQ(parameters[1].grad()[0].item<float>(), -2);
  EXPECT_TRUE(std::isnan(clip_grad_norm_(parameters, 1).item<float>()));
  EXPECT_TRUE(std::isnan(parameters[1].grad()[0].item<float>()));
}

TEST(ClipGradTest, ValuesAreLimited) {
  const Tensors parameters = Parameters();
  clip_grad_value_(parameters, 1);
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::linspace(-2, 3, 5).clamp(-1, 1)));
}

TEST(ClipGradTest, SparseGradientsAreRefused) {
  torch::Tensor table = torch::zeros({2, 2});
  table.mutable_grad() = torch::ones({2, 2}).to_sparse();
  EXPECT_THAT(ErrorOf([&] { clip_grad_norm_({table}, 1); }), HasSubstr("a gradient is sparse"));
}

// Each rank has another part; rank 1 of three none.
RANK_TEST(ClipGradTest, PartsOfAllRanksHaveOneNorm, 3) {
  const auto group = init_process_group();
  Tensors parameters = {torch::zeros({2}, group->device())};
  if (group->rank() != 1) {
    parameters[0].mutable_grad() = torch::full({2}, group->rank() + 1.0, group->device());
  }
  const auto norm_of = [&](double norm_type) {
    return get_total_norm(parameters, {.norm_type = norm_type, .shards_of = group}).item<float>();
  };
  EXPECT_THAT(norm_of(1), FloatEq(8));
  EXPECT_THAT(norm_of(2), FloatEq(std::sqrt(20.0F)));
  EXPECT_EQ(norm_of(kInfinity), 3);
  if (group->rank() == 2) parameters[0].grad()[0] = std::nan("");
  EXPECT_TRUE(std::isnan(norm_of(2)));
  EXPECT_TRUE(std::isnan(norm_of(kInfinity)));
}

// A model of one parameter, whose gradient is infinite on request.
struct Scaled {
  explicit Scaled(const GradScalerOptions& options, at::Device device = at::kCPU)
      : parameter(torch::ones({2}, device).requires_grad_()),
        optimizer({parameter}, torch::optim::SGDOptions(0.5)),
        scaler(options) {}

  bool Step(bool infinite) {
    optimizer.zero_grad();
    scaler.scale((parameter * (infinite ? kInfinity : 1.0)).sum()).backward();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  }
  float value() const { return parameter[0].item<float>(); }

  torch::Tensor parameter;
  torch::optim::SGD optimizer;
  GradScaler scaler;
};

const GradScalerOptions kQuick = {.init_scale = 1024, .backoff_factor = 0.25, .growth_interval = 3};

TEST(GradScalerTest, ScalesAreThoseOfPyTorch) {
  Scaled scaled(kQuick);
  std::vector<double> scales, values;
  for (int step = 0; step < 12; ++step) {
    const bool infinite = step == 2 || step == 3 || step == 9;
    EXPECT_EQ(scaled.Step(infinite), !infinite);
    scales.push_back(scaled.scaler.get_scale());
    values.push_back(scaled.value());
  }
  EXPECT_THAT(scales, ElementsAre(1024, 1024, 256, 64, 64, 64, 128, 128, 128, 32, 32, 32));
  EXPECT_THAT(values, ElementsAre(0.5, 0, 0, 0, -0.5, -1, -1.5, -2, -2.5, -2.5, -3, -3.5));
}

TEST(GradScalerTest, GradientsAreUnscaledBeforeClipping) {
  Scaled scaled(kQuick);
  scaled.scaler.scale(scaled.parameter.sum()).backward();
  EXPECT_EQ(scaled.parameter.grad()[0].item<float>(), 1024);
  scaled.scaler.unscale_(scaled.optimizer);
  EXPECT_THAT(clip_grad_norm_({scaled.parameter}, 0.1).item<float>(), FloatEq(std::sqrt(2.0F)));
  EXPECT_TRUE(scaled.scaler.step(scaled.optimizer));
  EXPECT_THAT(scaled.value(), FloatEq(1 - 0.5F * 0.1F / std::sqrt(2.0F)));
}

TEST(GradScalerTest, AStateGoesOnWhereItWasSaved) {
  Scaled saving(kQuick);
  for (const bool infinite : {true, false, false}) saving.Step(infinite);
  Scaled loading(kQuick);
  loading.scaler.load_state(saving.scaler.save_state());
  EXPECT_EQ(loading.scaler.get_scale(), 256);
  loading.Step(false);  // the third in turn without an infinity
  EXPECT_EQ(loading.scaler.get_scale(), 512);
  EXPECT_THAT(ErrorOf([&] { loading.scaler.load_state({}); }), HasSubstr("no value \"kind\""));
}

TEST(GradScalerTest, TheProgramMaySetTheScale) {
  Scaled scaled(kQuick);
  scaled.Step(false);
  scaled.scaler.update(8);
  EXPECT_EQ(scaled.scaler.get_scale(), 8);
}

TEST(GradScalerTest, DisabledItDoesNothing) {
  Scaled scaled({.enabled = false});
  EXPECT_TRUE(scaled.Step(false));
  EXPECT_EQ(scaled.value(), 0.5);
  EXPECT_EQ(scaled.scaler.get_scale(), 1);
}

TEST(GradScalerTest, MistakesAreNamed) {
  const auto scaled = [](auto action) {
    return [action] {
      Scaled made(kQuick);
      action(made);
    };
  };
  const auto backward = [](Scaled& s) { s.scaler.scale(s.parameter.sum()).backward(); };
  const std::vector<std::pair<std::string, std::function<void()>>> cases = {
      {"init_scale must be", [] { GradScaler({.init_scale = 0}); }},
      {"growth_factor must be", [] { GradScaler({.growth_factor = 1}); }},
      {"backoff_factor must be", [] { GradScaler({.backoff_factor = 1}); }},
      {"growth_interval must be", [] { GradScaler({.growth_interval = 0}); }},
      {"step() before scale()", scaled([](Scaled& s) { s.scaler.step(s.optimizer); })},
      {"update() before scale()", scaled([](Scaled& s) { s.scaler.update(); })},
      {"update() before step()", scaled([&](Scaled& s) {
         backward(s);
         s.scaler.update();
       })},
      {"step() was called already", scaled([&](Scaled& s) {
         backward(s);
         s.scaler.step(s.optimizer);
         s.scaler.step(s.optimizer);
       })},
      {"unscale_() was called already", scaled([&](Scaled& s) {
         backward(s);
         s.scaler.unscale_(s.optimizer);
         s.scaler.unscale_(s.optimizer);
       })},
      {"a gradient is float16", scaled([&](Scaled& s) {
         backward(s);
         torch::Tensor half = torch::ones({2}, torch::kHalf);
         half.mutable_grad() = torch::ones({2}, torch::kHalf);
         torch::optim::SGD optimizer({half}, torch::optim::SGDOptions(1));
         s.scaler.step(optimizer);
       })},
  };
  for (const auto& [text, action] : cases) EXPECT_THAT(ErrorOf(action), HasSubstr(text));
}

// Gradients that the ranks do not average: an infinity is on rank 1 alone.
RANK_TEST(GradScalerTest, AnInfinityOnOneRankCountsOnAll, 2) {
  const auto group = init_process_group();
  GradScalerOptions options = kQuick;
  options.group = group;
  Scaled scaled(options, group->device());
  std::vector<double> scales, values;
  for (int step = 0; step < 5; ++step) {
    const bool infinite = step == 1;
    EXPECT_EQ(scaled.Step(infinite && group->rank() == 1), !infinite);
    scales.push_back(scaled.scaler.get_scale());
    values.push_back(scaled.value());
  }
  EXPECT_THAT(scales, ElementsAre(1024, 256, 256, 256, 512));
  EXPECT_THAT(values, ElementsAre(0.5, 0.5, 0, -0.5, -1));
}

}  // namespace
}  // namespace ddp::train
