// The order of the operations decides the last bits: it is that of PyTorch's Python. BUILD.bazel
// forbids the compiler to contract a product and a sum.
#include "train/schedulers/schedulers.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

namespace ddp::train {

namespace {

using internal::Require;

constexpr double kPi = std::numbers::pi;

std::vector<LRLambda> CheckedLambdas(std::vector<LRLambda> lambdas,
                                     const ScheduledOptimizer& optimizer, const char* kind) {
  Require(lambdas.size() == optimizer.size(),
          std::string(kind) + ": there are " + std::to_string(lambdas.size()) + " functions and " +
              std::to_string(optimizer.size()) + " parameter groups; give one for each");
  for (const LRLambda& lambda : lambdas) {
    Require(lambda != nullptr, std::string(kind) + ": a function is empty");
  }
  return lambdas;
}

std::vector<LRLambda> SameForAll(const LRLambda& lambda, const ScheduledOptimizer& optimizer) {
  return std::vector<LRLambda>(optimizer.size(), lambda);
}

// Returns `rates`, each changed by `change`.
template <typename Change>
std::vector<double> Each(std::vector<double> rates, Change change) {
  for (double& rate : rates) rate = change(rate);
  return rates;
}

}  // namespace

LambdaLR::LambdaLR(ScheduledOptimizer optimizer, LRLambda lambda)
    : LambdaLR(optimizer, SameForAll(lambda, optimizer)) {}

LambdaLR::LambdaLR(ScheduledOptimizer optimizer, std::vector<LRLambda> lambdas)
    : LRScheduler(optimizer, "LambdaLR"),
      lambdas_(CheckedLambdas(std::move(lambdas), optimizer, "LambdaLR")) {
  initial_step();
}

std::vector<double> LambdaLR::get_lr() {
  std::vector<double> rates = base_lrs();
  for (size_t i = 0; i < rates.size(); ++i) rates[i] *= lambdas_[i](last_epoch());
  return rates;
}

MultiplicativeLR::MultiplicativeLR(ScheduledOptimizer optimizer, LRLambda lambda)
    : MultiplicativeLR(optimizer, SameForAll(lambda, optimizer)) {}

MultiplicativeLR::MultiplicativeLR(ScheduledOptimizer optimizer, std::vector<LRLambda> lambdas)
    : LRScheduler(optimizer, "MultiplicativeLR"),
      lambdas_(CheckedLambdas(std::move(lambdas), optimizer, "MultiplicativeLR")) {
  initial_step();
}

std::vector<double> MultiplicativeLR::get_lr() {
  std::vector<double> rates = optimizer().rates();
  if (is_initial()) return rates;
  for (size_t i = 0; i < rates.size(); ++i) rates[i] *= lambdas_[i](last_epoch());
  return rates;
}

StepLR::StepLR(ScheduledOptimizer optimizer, StepLROptions options)
    : LRScheduler(std::move(optimizer), "StepLR"), options_(options) {
  Require(options.step_size >= 1,
          "StepLR: step_size is " + std::to_string(options.step_size) + ", it must be at least 1");
  initial_step();
}

std::vector<double> StepLR::get_lr() {
  if (last_epoch() == 0 || last_epoch() % options_.step_size != 0) return optimizer().rates();
  return times(options_.gamma);
}

std::vector<double> StepLR::closed_form_lr() {
  const double factor = std::pow(options_.gamma, last_epoch() / options_.step_size);
  return Each(base_lrs(), [&](double base) { return base * factor; });
}

MultiStepLR::MultiStepLR(ScheduledOptimizer optimizer, const MultiStepLROptions& options)
    : LRScheduler(std::move(optimizer), "MultiStepLR"), gamma_(options.gamma) {
  for (const int64_t milestone : options.milestones) ++milestones_[milestone];
  initial_step();
}

std::vector<double> MultiStepLR::get_lr() {
  const auto found = milestones_.find(last_epoch());
  return found == milestones_.end() ? optimizer().rates() : times(std::pow(gamma_, found->second));
}

std::vector<double> MultiStepLR::closed_form_lr() {
  int64_t decays = 0;
  for (const auto& [milestone, count] : milestones_) {
    if (milestone <= last_epoch()) decays += count;
  }
  return Each(base_lrs(), [&](double base) { return base * std::pow(gamma_, decays); });
}

ConstantLR::ConstantLR(ScheduledOptimizer optimizer, ConstantLROptions options)
    : LRScheduler(std::move(optimizer), "ConstantLR"), options_(options) {
  Require(options.factor > 0 && options.factor <= 1,
          "ConstantLR: factor is " + std::to_string(options.factor) +
              ", it must be greater than 0 and at most 1");
  Require(options.total_iters >= 0, "ConstantLR: total_iters is negative");
  initial_step();
}

std::vector<double> ConstantLR::get_lr() {
  if (last_epoch() == 0) return times(options_.factor);
  if (last_epoch() != options_.total_iters) return optimizer().rates();
  return times(1.0 / options_.factor);
}

std::vector<double> ConstantLR::closed_form_lr() {
  const double over = last_epoch() >= options_.total_iters ? 1 : 0;
  const double factor = options_.factor + over * (1 - options_.factor);
  return Each(base_lrs(), [&](double base) { return base * factor; });
}

LinearLR::LinearLR(ScheduledOptimizer optimizer, LinearLROptions options)
    : LRScheduler(std::move(optimizer), "LinearLR"), options_(options) {
  Require(options.start_factor > 0 && options.start_factor <= 1,
          "LinearLR: start_factor is " + std::to_string(options.start_factor) +
              ", it must be greater than 0 and at most 1");
  Require(options.end_factor >= 0 && options.end_factor <= 1,
          "LinearLR: end_factor is " + std::to_string(options.end_factor) +
              ", it must be between 0 and 1");
  Require(options.total_iters >= 1, "LinearLR: total_iters is " +
                                        std::to_string(options.total_iters) +
                                        ", it must be at least 1");
  initial_step();
}

std::vector<double> LinearLR::get_lr() {
  const auto [start, end, total] = options_;
  if (last_epoch() == 0) return times(start);
  if (is_initial() || last_epoch() > total) return optimizer().rates();
  const double reached = total * start + (last_epoch() - 1) * (end - start);
  return times(1.0 + (end - start) / reached);
}

std::vector<double> LinearLR::closed_form_lr() {
  const auto [start, end, total] = options_;
  const double factor = start + (end - start) * std::min(total, last_epoch()) / total;
  return Each(base_lrs(), [&](double base) { return base * factor; });
}

ExponentialLR::ExponentialLR(ScheduledOptimizer optimizer, double gamma)
    : LRScheduler(std::move(optimizer), "ExponentialLR"), gamma_(gamma) {
  initial_step();
}

std::vector<double> ExponentialLR::get_lr() {
  return is_initial() ? optimizer().rates() : times(gamma_);
}

std::vector<double> ExponentialLR::closed_form_lr() {
  return Each(base_lrs(), [&](double base) { return base * std::pow(gamma_, last_epoch()); });
}

PolynomialLR::PolynomialLR(ScheduledOptimizer optimizer, PolynomialLROptions options)
    : LRScheduler(std::move(optimizer), "PolynomialLR"), options_(options) {
  Require(options.total_iters >= 1, "PolynomialLR: total_iters is " +
                                        std::to_string(options.total_iters) +
                                        ", it must be at least 1");
  Require(options.power >= 0,
          "PolynomialLR: power is " + std::to_string(options.power) + ", it must not be negative");
  initial_step();
}

std::vector<double> PolynomialLR::get_lr() {
  if (is_initial() || last_epoch() > options_.total_iters) return optimizer().rates();
  const double total = options_.total_iters;
  const double left = (1.0 - last_epoch() / total) / (1.0 - (last_epoch() - 1) / total);
  return times(std::pow(left, options_.power));
}

std::vector<double> PolynomialLR::closed_form_lr() {
  const double total = options_.total_iters;
  const double left = 1.0 - std::min(options_.total_iters, last_epoch()) / total;
  return Each(base_lrs(), [&](double base) { return base * std::pow(left, options_.power); });
}

CosineAnnealingLR::CosineAnnealingLR(ScheduledOptimizer optimizer, CosineAnnealingLROptions options)
    : LRScheduler(std::move(optimizer), "CosineAnnealingLR"), options_(options) {
  Require(options.t_max >= 1, "CosineAnnealingLR: t_max is " + std::to_string(options.t_max) +
                                  ", it must be at least 1");
  initial_step();
}

std::vector<double> CosineAnnealingLR::get_lr() {
  std::vector<double> rates = optimizer().rates();
  if (is_initial()) return rates;
  const auto [t_max, eta_min] = options_;
  // The lowest point: the quotient below would be of two zeros.
  if ((last_epoch() - 1 - t_max) % (2 * t_max) == 0) {
    for (size_t i = 0; i < rates.size(); ++i) {
      rates[i] = rates[i] + (base_lrs()[i] - eta_min) * (1 - std::cos(kPi / t_max)) / 2;
    }
    return rates;
  }
  const double now = 1 + std::cos(kPi * last_epoch() / t_max);
  const double before = 1 + std::cos(kPi * (last_epoch() - 1) / t_max);
  return Each(std::move(rates),
              [&, low = eta_min](double rate) { return now / before * (rate - low) + low; });
}

std::vector<double> CosineAnnealingLR::closed_form_lr() {
  const double cosine = 1 + std::cos(kPi * last_epoch() / options_.t_max);
  return Each(base_lrs(), [&](double base) {
    return options_.eta_min + (base - options_.eta_min) * cosine / 2;
  });
}

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(ScheduledOptimizer optimizer,
                                                         CosineAnnealingWarmRestartsOptions options)
    : LRScheduler(std::move(optimizer), "CosineAnnealingWarmRestarts"),
      options_(options),
      cycle_(options.t_0) {
  Require(options.t_0 >= 1, "CosineAnnealingWarmRestarts: t_0 is " + std::to_string(options.t_0) +
                                ", it must be at least 1");
  Require(options.t_mult >= 1, "CosineAnnealingWarmRestarts: t_mult is " +
                                   std::to_string(options.t_mult) + ", it must be at least 1");
  initial_step();
}

std::vector<double> CosineAnnealingWarmRestarts::get_lr() {
  const double cosine = 1 + std::cos(kPi * in_cycle_ / cycle_);
  return Each(base_lrs(), [&](double base) {
    return options_.eta_min + (base - options_.eta_min) * cosine / 2;
  });
}

void CosineAnnealingWarmRestarts::step() {
  if (last_epoch() < 0) return step(0);
  in_cycle_ += 1;
  if (in_cycle_ >= cycle_) {
    in_cycle_ = std::fmod(in_cycle_, cycle_);
    cycle_ *= options_.t_mult;
  }
  set_last_epoch(last_epoch() + 1);
  apply(get_lr());
}

void CosineAnnealingWarmRestarts::step(double epoch) {
  Require(epoch >= 0, "CosineAnnealingWarmRestarts: epoch is " + std::to_string(epoch) +
                          ", it must not be negative");
  const double first = options_.t_0;
  const double mult = options_.t_mult;
  if (epoch < first) {
    cycle_ = options_.t_0;
    in_cycle_ = epoch;
  } else if (options_.t_mult == 1) {
    in_cycle_ = std::fmod(epoch, first);
  } else {
    const double cycles = std::trunc(std::log(epoch / first * (mult - 1) + 1) / std::log(mult));
    in_cycle_ = epoch - first * (std::pow(mult, cycles) - 1) / (mult - 1);
    cycle_ = static_cast<int64_t>(first * std::pow(mult, cycles));
  }
  set_last_epoch(static_cast<int64_t>(std::floor(epoch)));
  apply(get_lr());
}

SavedState CosineAnnealingWarmRestarts::save_state() const {
  SavedState state = LRScheduler::save_state();
  state.values["t_cur"] = in_cycle_;
  state.values["t_i"] = cycle_;
  return state;
}

void CosineAnnealingWarmRestarts::load_state(const SavedState& state) {
  const auto in_cycle = state.value<double>("t_cur");
  const auto cycle = state.value<int64_t>("t_i");
  LRScheduler::load_state(state);
  in_cycle_ = in_cycle;
  cycle_ = cycle;
}

SWALR::SWALR(ScheduledOptimizer optimizer, SWALROptions options)
    : LRScheduler(optimizer, "SWALR"), options_(std::move(options)) {
  options_.swa_lr = internal::ForEachGroup("SWALR: swa_lr", options_.swa_lr, optimizer);
  Require(options_.anneal_epochs >= 0, "SWALR: anneal_epochs is negative");
  initial_step();
}

// Returns the share of swa_lr in the rate.
double SWALR::ShareAt(int64_t step) const {
  const double length = std::max<int64_t>(1, options_.anneal_epochs);
  const double share = std::clamp(step / length, 0.0, 1.0);
  if (options_.anneal_strategy == SWALROptions::Anneal::kLinear) return share;
  return (1 - std::cos(kPi * share)) / 2;
}

std::vector<double> SWALR::get_lr() {
  int64_t step = step_count() - 1;
  if (options_.anneal_epochs == 0) step = std::max<int64_t>(1, step);
  const double before = ShareAt(step - 1);
  const double now = ShareAt(step);
  std::vector<double> rates = optimizer().rates();
  for (size_t i = 0; i < rates.size(); ++i) {
    const double target = options_.swa_lr[i];
    // The rate without the share that it has already.
    const double base = before == 1 ? target : (rates[i] - before * target) / (1 - before);
    rates[i] = target * now + base * (1 - now);
  }
  return rates;
}

}  // namespace ddp::train
