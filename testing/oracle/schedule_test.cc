// Compares our schedulers with PyTorch's, to the bit: the table schedules.json, run by schedules.py
// there and here. See README.md.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "ddp/common/stateful.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/oracle/pytorch_values.h"
#include "train/schedulers/composed_schedulers.h"
#include "train/schedulers/cycle_schedulers.h"
#include "train/schedulers/reduce_lr_on_plateau.h"
#include "train/schedulers/schedulers.h"

namespace ddp::testing {
namespace {

using Json = nlohmann::json;
using train::LRScheduler;
using train::ScheduledOptimizer;

constexpr int kSteps = 200;

std::function<double(double)> LambdaOf(const std::string& name) {
  if (name == "inverse_root") return [](double step) { return 1.0 / std::pow(1.0 + step, 0.5); };
  const double base = name == "power" ? 0.95 : 0.999;
  return [base](double step) { return std::pow(base, step); };
}

std::vector<train::LRLambda> LambdasOf(const Json& spec, const ScheduledOptimizer& optimizer) {
  std::vector<train::LRLambda> lambdas;
  for (const std::string name : spec["lambda"]) lambdas.push_back(LambdaOf(name));
  return lambdas;
}

double Metric(int step) { return 1.0 / (1.0 + step) + ((step * 7919) % 97) / 970.0; }

template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> NewOptimizer(const Json& rates, Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : rates) {
    auto of_group = std::make_unique<Options>(options);
    of_group->lr(rate);
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({1})}, std::move(of_group));
  }
  return std::make_unique<Optimizer>(groups, options);
}

std::unique_ptr<torch::optim::Optimizer> OptimizerOf(const Json& run) {
  const std::string name = run.value("optimizer", "sgd");
  const Json& rates = run["lr"];
  if (name == "adam") return NewOptimizer<torch::optim::Adam>(rates, torch::optim::AdamOptions(1));
  if (name == "adamw") {
    return NewOptimizer<torch::optim::AdamW>(rates, torch::optim::AdamWOptions(1));
  }
  if (name == "rmsprop") {
    return NewOptimizer<torch::optim::RMSprop>(rates,
                                               torch::optim::RMSpropOptions(1).momentum(0.5));
  }
  return NewOptimizer<torch::optim::SGD>(rates, torch::optim::SGDOptions(1).momentum(0.9));
}

// Sets `field` where the table names `key`.
template <typename T>
void Read(const Json& spec, const char* key, T& field) {
  if (spec.contains(key)) field = spec[key].get<T>();
}

std::shared_ptr<LRScheduler> OneCycleOf(const Json& spec, const ScheduledOptimizer& optimizer) {
  train::OneCycleLROptions options;
  Read(spec, "max_lr", options.max_lr);
  Read(spec, "total_steps", options.total_steps);
  Read(spec, "epochs", options.epochs);
  Read(spec, "steps_per_epoch", options.steps_per_epoch);
  Read(spec, "pct_start", options.pct_start);
  if (spec.value("anneal_strategy", "cos") == "linear") {
    options.anneal_strategy = train::OneCycleLROptions::Anneal::kLinear;
  }
  Read(spec, "cycle_momentum", options.cycle_momentum);
  Read(spec, "base_momentum", options.base_momentum);
  Read(spec, "max_momentum", options.max_momentum);
  Read(spec, "div_factor", options.div_factor);
  Read(spec, "final_div_factor", options.final_div_factor);
  Read(spec, "three_phase", options.three_phase);
  return std::make_shared<train::OneCycleLR>(optimizer, options);
}

std::shared_ptr<LRScheduler> CyclicOf(const Json& spec, const ScheduledOptimizer& optimizer) {
  using Options = train::CyclicLROptions;
  Options options;
  Read(spec, "base_lr", options.base_lr);
  Read(spec, "max_lr", options.max_lr);
  Read(spec, "step_size_up", options.step_size_up);
  if (spec.contains("step_size_down")) options.step_size_down = spec["step_size_down"];
  const std::string mode = spec.value("mode", "triangular");
  if (mode == "triangular2") options.mode = Options::Mode::kTriangular2;
  if (mode == "exp_range") options.mode = Options::Mode::kExpRange;
  Read(spec, "gamma", options.gamma);
  if (spec.contains("scale_fn")) options.scale_fn = LambdaOf(spec["scale_fn"]);
  if (spec.value("scale_mode", "cycle") == "iterations") {
    options.scale_mode = Options::ScaleMode::kIterations;
  }
  Read(spec, "cycle_momentum", options.cycle_momentum);
  Read(spec, "base_momentum", options.base_momentum);
  Read(spec, "max_momentum", options.max_momentum);
  return std::make_shared<train::CyclicLR>(optimizer, options);
}

std::shared_ptr<LRScheduler> FactorSchedulerOf(const std::string& kind, const Json& spec,
                                               const ScheduledOptimizer& optimizer) {
  if (kind == "StepLR") {
    train::StepLROptions options;
    Read(spec, "step_size", options.step_size);
    Read(spec, "gamma", options.gamma);
    return std::make_shared<train::StepLR>(optimizer, options);
  }
  if (kind == "MultiStepLR") {
    train::MultiStepLROptions options;
    Read(spec, "milestones", options.milestones);
    Read(spec, "gamma", options.gamma);
    return std::make_shared<train::MultiStepLR>(optimizer, options);
  }
  if (kind == "ConstantLR") {
    train::ConstantLROptions options;
    Read(spec, "factor", options.factor);
    Read(spec, "total_iters", options.total_iters);
    return std::make_shared<train::ConstantLR>(optimizer, options);
  }
  if (kind == "LinearLR") {
    train::LinearLROptions options;
    Read(spec, "start_factor", options.start_factor);
    Read(spec, "end_factor", options.end_factor);
    Read(spec, "total_iters", options.total_iters);
    return std::make_shared<train::LinearLR>(optimizer, options);
  }
  if (kind == "PolynomialLR") {
    train::PolynomialLROptions options;
    Read(spec, "total_iters", options.total_iters);
    Read(spec, "power", options.power);
    return std::make_shared<train::PolynomialLR>(optimizer, options);
  }
  return std::make_shared<train::ExponentialLR>(optimizer, spec["gamma"].get<double>());
}

std::shared_ptr<LRScheduler> SchedulerOf(const Json& spec, const ScheduledOptimizer& optimizer) {
  const std::string kind = spec["class"];
  if (kind == "LambdaLR") {
    return std::make_shared<train::LambdaLR>(optimizer, LambdasOf(spec, optimizer));
  }
  if (kind == "MultiplicativeLR") {
    return std::make_shared<train::MultiplicativeLR>(optimizer, LambdasOf(spec, optimizer));
  }
  if (kind == "OneCycleLR") return OneCycleOf(spec, optimizer);
  if (kind == "CyclicLR") return CyclicOf(spec, optimizer);
  if (kind == "CosineAnnealingLR") {
    train::CosineAnnealingLROptions options;
    Read(spec, "T_max", options.t_max);
    Read(spec, "eta_min", options.eta_min);
    return std::make_shared<train::CosineAnnealingLR>(optimizer, options);
  }
  if (kind == "CosineAnnealingWarmRestarts") {
    train::CosineAnnealingWarmRestartsOptions options;
    Read(spec, "T_0", options.t_0);
    Read(spec, "T_mult", options.t_mult);
    Read(spec, "eta_min", options.eta_min);
    return std::make_shared<train::CosineAnnealingWarmRestarts>(optimizer, options);
  }
  if (kind == "SWALR") {
    train::SWALROptions options;
    Read(spec, "swa_lr", options.swa_lr);
    Read(spec, "anneal_epochs", options.anneal_epochs);
    if (spec.value("anneal_strategy", "cos") == "linear") {
      options.anneal_strategy = train::SWALROptions::Anneal::kLinear;
    }
    return std::make_shared<train::SWALR>(optimizer, options);
  }
  if (!spec.contains("schedulers")) return FactorSchedulerOf(kind, spec, optimizer);
  std::vector<std::shared_ptr<LRScheduler>> parts;
  for (const Json& part : spec["schedulers"]) parts.push_back(SchedulerOf(part, optimizer));
  if (kind == "ChainedScheduler") {
    return std::make_shared<train::ChainedScheduler>(optimizer, parts);
  }
  return std::make_shared<train::SequentialLR>(optimizer, parts,
                                               spec["milestones"].get<std::vector<int64_t>>());
}

std::shared_ptr<train::ReduceLROnPlateau> PlateauOf(const Json& spec,
                                                    const ScheduledOptimizer& optimizer) {
  using Options = train::ReduceLROnPlateauOptions;
  Options options;
  if (spec.value("mode", "min") == "max") options.mode = Options::Mode::kMax;
  Read(spec, "factor", options.factor);
  Read(spec, "patience", options.patience);
  Read(spec, "threshold", options.threshold);
  if (spec.value("threshold_mode", "rel") == "abs") {
    options.threshold_mode = Options::ThresholdMode::kAbs;
  }
  Read(spec, "cooldown", options.cooldown);
  Read(spec, "min_lr", options.min_lr);
  Read(spec, "eps", options.eps);
  return std::make_shared<train::ReduceLROnPlateau>(optimizer, options);
}

// A run's optimizer and scheduler.
struct Trained {
  explicit Trained(const Json& run) : optimizer(OptimizerOf(run)), target(*optimizer) {
    const Json& spec = run["scheduler"];
    if (spec["class"] == "ReduceLROnPlateau") {
      const auto plateau = PlateauOf(spec, target);
      step = [plateau](int number) { plateau->step(Metric(number)); };
      state = plateau;
    } else {
      const auto scheduler = SchedulerOf(spec, target);
      step = [scheduler](int) { scheduler->step(); };
      state = scheduler;
    }
  }

  const std::unique_ptr<torch::optim::Optimizer> optimizer;
  const ScheduledOptimizer target;
  std::function<void(int step)> step;
  std::shared_ptr<Stateful> state;
};

void Append(const std::vector<double>& values, std::vector<double>& all) {
  all.insert(all.end(), values.begin(), values.end());
}

// After a restart, the rates and momenta come from the scheduler's state alone.
TEST(ScheduleTest, RatesAndMomentaHavePyTorchsBits) {
  const auto theirs = ReadPyTorchValues("schedules.safetensors");
  const Json runs = ReadOracleTable("schedules.json");
  ASSERT_EQ(theirs.size(), 2 * runs.size());
  for (const Json& run : runs) {
    const std::string name = run["name"];
    auto trained = std::make_unique<Trained>(run);
    std::vector<double> rates = trained->target.rates();
    std::vector<double> momenta = trained->target.momenta();
    for (int step = 1; step <= kSteps; ++step) {
      trained->step(step);
      Append(trained->target.rates(), rates);
      Append(trained->target.momenta(), momenta);
      if (step == 67 || step == 134) {
        const SavedState saved = trained->state->save_state();
        trained = std::make_unique<Trained>(run);
        trained->state->load_state(saved);
      }
    }
    EXPECT_THAT(rates, ::testing::ElementsAreArray(theirs.at(name + "/lr"))) << name;
    EXPECT_THAT(momenta, ::testing::ElementsAreArray(theirs.at(name + "/momentum"))) << name;
  }
}

}  // namespace
}  // namespace ddp::testing
