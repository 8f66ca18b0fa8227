#include "train/schedulers/reduce_lr_on_plateau.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "ddp/process_group.h"
#include "train/schedulers/lr_scheduler.h"

namespace ddp::train {

namespace {

using internal::ForEachGroup;
using internal::Require;
using Mode = ReduceLROnPlateauOptions::Mode;
using ThresholdMode = ReduceLROnPlateauOptions::ThresholdMode;

constexpr char kKind[] = "ReduceLROnPlateau";

}  // namespace

ReduceLROnPlateau::ReduceLROnPlateau(ScheduledOptimizer optimizer, ReduceLROnPlateauOptions options)
    : optimizer_(std::move(optimizer)), options_(std::move(options)), last_lr_(optimizer_.rates()) {
  Require(options_.factor < 1, "ReduceLROnPlateau: factor is " + std::to_string(options_.factor) +
                                   ", it must be less than 1");
  ForEachGroup("ReduceLROnPlateau: min_lr", options_.min_lr, optimizer_);
  const double infinity = std::numeric_limits<double>::infinity();
  best_ = options_.mode == Mode::kMin ? infinity : -infinity;
}

double ReduceLROnPlateau::Agreed(double metric) const {
  if (options_.group == nullptr) return metric;
  const at::Tensor sum = at::full(
      {1}, metric, at::TensorOptions().dtype(at::kDouble).device(options_.group->device()));
  options_.group->all_reduce(sum, ReduceOp::kSum);
  return sum.item<double>() / options_.group->size();
}

bool ReduceLROnPlateau::IsBetter(double metric) const {
  const double threshold = options_.threshold;
  if (options_.threshold_mode == ThresholdMode::kRel) {
    return options_.mode == Mode::kMin ? metric < best_ * (1.0 - threshold)
                                       : metric > best_ * (threshold + 1.0);
  }
  return options_.mode == Mode::kMin ? metric < best_ - threshold : metric > best_ + threshold;
}

void ReduceLROnPlateau::Reduce() {
  const auto lowest = ForEachGroup("ReduceLROnPlateau: min_lr", options_.min_lr, optimizer_);
  std::vector<double> rates = optimizer_.rates();
  for (size_t i = 0; i < rates.size(); ++i) {
    const double reduced = std::max(rates[i] * options_.factor, lowest[i]);
    if (rates[i] - reduced > options_.eps) rates[i] = reduced;
  }
  optimizer_.set_rates(rates);
}

void ReduceLROnPlateau::step(double metric) {
  metric = Agreed(metric);
  ++last_epoch_;
  if (IsBetter(metric)) {
    best_ = metric;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (cooldown_counter_ > 0) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ > options_.patience) {
    Reduce();
    cooldown_counter_ = options_.cooldown;
    num_bad_epochs_ = 0;
  }
  last_lr_ = optimizer_.rates();
}

SavedState ReduceLROnPlateau::save_state() const {
  SavedState state;
  state.values["kind"] = std::string(kKind);
  state.values["best"] = best_;
  state.values["last_epoch"] = last_epoch_;
  state.values["num_bad_epochs"] = num_bad_epochs_;
  state.values["cooldown_counter"] = cooldown_counter_;
  state.values["last_lr"] = last_lr_;
  state.values["lr"] = optimizer_.rates();
  return state;
}

void ReduceLROnPlateau::load_state(const SavedState& state) {
  const auto& kind = state.value<std::string>("kind");
  Require(kind == kKind,
          "the saved state is of a " + kind + ", the scheduler is a ReduceLROnPlateau");
  const auto best = state.value<double>("best");
  const auto last_epoch = state.value<int64_t>("last_epoch");
  const auto num_bad_epochs = state.value<int64_t>("num_bad_epochs");
  const auto cooldown_counter = state.value<int64_t>("cooldown_counter");
  const auto last_lr = state.value<std::vector<double>>("last_lr");
  optimizer_.set_rates(state.value<std::vector<double>>("lr"));
  best_ = best;
  last_epoch_ = last_epoch;
  num_bad_epochs_ = num_bad_epochs;
  cooldown_counter_ = cooldown_counter;
  last_lr_ = last_lr;
}

}  // namespace ddp::train
