// The order of the operations decides the last bits: it is that of PyTorch's Python. BUILD.bazel
// forbids the compiler to contract a product and a sum.
#include "train/schedulers/cycle_schedulers.h"

#include <cmath>
#include <numbers>
#include <string>
#include <utility>

namespace ddp::train {

namespace {

using internal::ForEachGroup;
using internal::Require;

void RequireMomentum(const ScheduledOptimizer& optimizer, const std::string& kind) {
  Require(optimizer.has_momentum(),
          kind + ": the optimizer has neither a momentum nor betas; set cycle_momentum = false");
}

// Returns the optimizer with `rates` set, for schedules that begin with rates of their own.
ScheduledOptimizer WithRates(const ScheduledOptimizer& optimizer,
                             const std::vector<double>& rates) {
  optimizer.set_rates(rates);
  return optimizer;
}

int64_t CheckedTotalSteps(const OneCycleLROptions& options) {
  Require(options.total_steps >= 0, "OneCycleLR: total_steps is negative");
  if (options.total_steps > 0) return options.total_steps;
  Require(options.epochs > 0 && options.steps_per_epoch > 0,
          "OneCycleLR: give total_steps, or epochs and steps_per_epoch, each at least 1");
  return options.epochs * options.steps_per_epoch;
}

}  // namespace

OneCycleLR::OneCycleLR(ScheduledOptimizer optimizer, OneCycleLROptions options)
    : LRScheduler(optimizer, "OneCycleLR"),
      options_(std::move(options)),
      total_steps_(CheckedTotalSteps(options_)) {
  const double share = options_.pct_start;
  Require(share >= 0 && share <= 1,
          "OneCycleLR: pct_start is " + std::to_string(share) + ", it must be between 0 and 1");
  Require(options_.div_factor != 0 && options_.final_div_factor != 0,
          "OneCycleLR: div_factor and final_div_factor must not be 0");
  const auto high = ForEachGroup("OneCycleLR: max_lr", options_.max_lr, optimizer);
  auto initial = high;
  for (double& rate : initial) rate /= options_.div_factor;
  auto low = initial;
  for (double& rate : low) rate /= options_.final_div_factor;
  const auto most = ForEachGroup("OneCycleLR: max_momentum", options_.max_momentum, optimizer);
  const auto least = ForEachGroup("OneCycleLR: base_momentum", options_.base_momentum, optimizer);
  if (options_.cycle_momentum) RequireMomentum(optimizer, "OneCycleLR");
  const double total = total_steps_;
  phases_.push_back({share * total - 1, initial, high, most, least});
  if (options_.three_phase) {
    phases_.push_back({2 * share * total - 2, high, initial, least, most});
    phases_.push_back({total - 1, initial, low, most, most});
  } else {
    phases_.push_back({total - 1, high, low, least, most});
  }
  optimizer.set_initial_rates(initial);
  set_base_lrs(initial);
  initial_step();
}

void OneCycleLR::step() {
  Require(last_epoch() < total_steps_, "OneCycleLR: step() was called more than total_steps = " +
                                           std::to_string(total_steps_) + " times");
  LRScheduler::step();
}

double OneCycleLR::Anneal(double start, double end, double share) const {
  if (options_.anneal_strategy == OneCycleLROptions::Anneal::kLinear) {
    return (end - start) * share + start;
  }
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * share) + 1);
}

std::vector<double> OneCycleLR::get_lr() {
  const double step = last_epoch();
  size_t i = 0;
  double start_step = 0;
  for (; i + 1 < phases_.size() && step > phases_[i].end_step; ++i)
    start_step = phases_[i].end_step;
  const Phase& phase = phases_[i];
  Require(phase.end_step != start_step,
          "OneCycleLR: a part of the cycle has no step; change pct_start or total_steps");
  const double share = (step - start_step) / (phase.end_step - start_step);
  std::vector<double> rates(phase.start_lr.size());
  std::vector<double> momenta(rates.size());
  for (size_t group = 0; group < rates.size(); ++group) {
    rates[group] = Anneal(phase.start_lr[group], phase.end_lr[group], share);
    momenta[group] = Anneal(phase.start_momentum[group], phase.end_momentum[group], share);
  }
  if (options_.cycle_momentum) optimizer().set_momenta(momenta);
  return rates;
}

CyclicLR::CyclicLR(ScheduledOptimizer optimizer, CyclicLROptions options)
    : LRScheduler(
          WithRates(optimizer, ForEachGroup("CyclicLR: base_lr", options.base_lr, optimizer)),
          "CyclicLR"),
      options_(std::move(options)) {
  options_.max_lr = ForEachGroup("CyclicLR: max_lr", options_.max_lr, optimizer);
  options_.base_momentum =
      ForEachGroup("CyclicLR: base_momentum", options_.base_momentum, optimizer);
  options_.max_momentum = ForEachGroup("CyclicLR: max_momentum", options_.max_momentum, optimizer);
  const double up = options_.step_size_up;
  const double down = options_.step_size_down.value_or(up);
  Require(up > 0, "CyclicLR: step_size_up must be greater than 0");
  Require(down >= 0, "CyclicLR: step_size_down must not be negative");
  if (options_.cycle_momentum) RequireMomentum(optimizer, "CyclicLR");
  total_size_ = up + down;
  step_ratio_ = up / total_size_;
  if (!options_.scale_fn) {
    const bool by_step = options_.mode == CyclicLROptions::Mode::kExpRange;
    options_.scale_mode =
        by_step ? CyclicLROptions::ScaleMode::kIterations : CyclicLROptions::ScaleMode::kCycle;
  }
  initial_step();
  set_base_lrs(ForEachGroup("CyclicLR: base_lr", options_.base_lr, optimizer));
}

double CyclicLR::Scale(double cycle) const {
  const bool by_cycle = options_.scale_mode == CyclicLROptions::ScaleMode::kCycle;
  const double x = by_cycle ? cycle : static_cast<double>(last_epoch());
  if (options_.scale_fn) return options_.scale_fn(x);
  switch (options_.mode) {
    case CyclicLROptions::Mode::kTriangular2:
      return 1 / std::pow(2.0, x - 1);
    case CyclicLROptions::Mode::kExpRange:
      return std::pow(options_.gamma, x);
    case CyclicLROptions::Mode::kTriangular:
      break;
  }
  return 1.0;
}

std::vector<double> CyclicLR::get_lr() {
  const double cycle = std::floor(1 + last_epoch() / total_size_);
  const double x = 1.0 + last_epoch() / total_size_ - cycle;
  const double height = x <= step_ratio_ ? x / step_ratio_ : (x - 1) / (step_ratio_ - 1);
  const double scale = Scale(cycle);
  std::vector<double> rates = base_lrs();
  std::vector<double> momenta = options_.max_momentum;
  for (size_t i = 0; i < rates.size(); ++i) {
    rates[i] = rates[i] + (options_.max_lr[i] - rates[i]) * height * scale;
    const double range = options_.max_momentum[i] - options_.base_momentum[i];
    momenta[i] = momenta[i] - range * height * scale;
  }
  if (options_.cycle_momentum) optimizer().set_momenta(momenta);
  return rates;
}

}  // namespace ddp::train
