#include "train/schedulers/lr_scheduler.h"

#include <utility>

#include "ddp/common/error.h"

namespace ddp::train {

LRScheduler::LRScheduler(ScheduledOptimizer optimizer, std::string kind)
    : optimizer_(std::move(optimizer)),
      kind_(std::move(kind)),
      base_lrs_(optimizer_.initial_rates()),
      last_lr_(optimizer_.rates()) {}

void LRScheduler::step() {
  internal::Require(optimizer_.size() == base_lrs_.size(),
                    kind_ +
                        ": the optimizer has got a parameter group since the scheduler was "
                        "made; make schedulers after the last add_param_group()");
  ++step_count_;
  ++last_epoch_;
  apply(get_lr());
}

void LRScheduler::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  step();
  is_initial_ = false;
}

void LRScheduler::restart() {
  last_epoch_ = 0;
  apply(closed_form_lr());
}

void LRScheduler::apply(const std::vector<double>& rates) {
  optimizer_.set_rates(rates);
  last_lr_ = rates;
}

std::vector<double> LRScheduler::times(double factor) const {
  std::vector<double> rates = optimizer_.rates();
  for (double& rate : rates) rate *= factor;
  return rates;
}

SavedState LRScheduler::save_state() const {
  SavedState state;
  state.values["kind"] = kind_;
  state.values["last_epoch"] = last_epoch_;
  state.values["step_count"] = step_count_;
  state.values["base_lrs"] = base_lrs_;
  state.values["last_lr"] = last_lr_;
  state.values["lr"] = optimizer_.rates();
  state.values["initial_lr"] = optimizer_.initial_rates();
  if (optimizer_.has_momentum()) state.values["momentum"] = optimizer_.momenta();
  return state;
}

void LRScheduler::load_state(const SavedState& state) {
  const auto& kind = state.value<std::string>("kind");
  internal::Require(kind == kind_, "the saved state is of a " + kind + ", the scheduler is a " +
                                       kind_ + "; make the scheduler that saved it");
  const auto last_epoch = state.value<int64_t>("last_epoch");
  const auto step_count = state.value<int64_t>("step_count");
  const auto base_lrs = state.value<std::vector<double>>("base_lrs");
  const auto last_lr = state.value<std::vector<double>>("last_lr");
  const auto rates = state.value<std::vector<double>>("lr");
  const auto initial_rates = state.value<std::vector<double>>("initial_lr");
  for (const auto* values : {&base_lrs, &last_lr, &rates, &initial_rates}) {
    internal::Require(values->size() == optimizer_.size(),
                      kind_ + ": the saved state has " + std::to_string(values->size()) +
                          " parameter groups, the optimizer " + std::to_string(optimizer_.size()));
  }
  if (optimizer_.has_momentum() && state.values.contains("momentum")) {
    optimizer_.set_momenta(state.value<std::vector<double>>("momentum"));
  }
  optimizer_.set_rates(rates);
  optimizer_.set_initial_rates(initial_rates);
  last_epoch_ = last_epoch;
  step_count_ = step_count;
  base_lrs_ = base_lrs;
  last_lr_ = last_lr;
}

namespace internal {

void Require(bool holds, const std::string& message) {
  if (!holds) throw ConfigurationError(message);
}

std::vector<double> ForEachGroup(const std::string& name, const std::vector<double>& values,
                                 const ScheduledOptimizer& optimizer) {
  if (values.size() == optimizer.size()) return values;
  Require(values.size() == 1, name + " has " + std::to_string(values.size()) +
                                  " values, the optimizer " + std::to_string(optimizer.size()) +
                                  " parameter groups; give one value, or one for each group");
  return std::vector<double>(optimizer.size(), values[0]);
}

}  // namespace internal

}  // namespace ddp::train
