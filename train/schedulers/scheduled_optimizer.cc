#include "train/schedulers/scheduled_optimizer.h"

#include <string>
#include <utility>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "ddp/common/error.h"
#include "train/optim/momentum_options.h"

namespace ddp::train {

namespace {

// Returns where the momentum, or the first beta, of `options` lies; null: they have none.
double* MomentumOf(torch::optim::OptimizerOptions& options) {
  if (auto* own = dynamic_cast<MomentumOptions*>(&options)) return &own->momentum_or_beta1();
  if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) return &sgd->momentum();
  if (auto* rms = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) return &rms->momentum();
  if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) {
    return &std::get<0>(adam->betas());
  }
  if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options)) {
    return &std::get<0>(adamw->betas());
  }
  return nullptr;
}

}  // namespace

struct ScheduledOptimizer::Target {
  torch::optim::Optimizer* const optimizer;
  std::vector<double> initial_rates;  // of the groups that a scheduler has asked for

  void RequireOneForEachGroup(size_t values) const {
    const size_t groups = optimizer->param_groups().size();
    if (values == groups) return;
    throw ConfigurationError("the optimizer has " + std::to_string(groups) +
                             " parameter groups, the scheduler " + std::to_string(values) +
                             " values; make schedulers after the last add_param_group()");
  }
};

ScheduledOptimizer::ScheduledOptimizer(torch::optim::Optimizer& optimizer)
    : target_(std::make_shared<Target>(Target{&optimizer, {}})) {}

size_t ScheduledOptimizer::size() const { return target_->optimizer->param_groups().size(); }

std::vector<double> ScheduledOptimizer::rates() const {
  std::vector<double> rates;
  for (auto& group : target_->optimizer->param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void ScheduledOptimizer::set_rates(const std::vector<double>& rates) const {
  target_->RequireOneForEachGroup(rates.size());
  auto& groups = target_->optimizer->param_groups();
  for (size_t i = 0; i < rates.size(); ++i) groups[i].options().set_lr(rates[i]);
}

bool ScheduledOptimizer::has_momentum() const {
  for (auto& group : target_->optimizer->param_groups()) {
    if (MomentumOf(group.options()) == nullptr) return false;
  }
  return true;
}

std::vector<double> ScheduledOptimizer::momenta() const {
  std::vector<double> momenta;
  for (auto& group : target_->optimizer->param_groups()) {
    momenta.push_back(*MomentumOf(group.options()));
  }
  return momenta;
}

void ScheduledOptimizer::set_momenta(const std::vector<double>& momenta) const {
  target_->RequireOneForEachGroup(momenta.size());
  auto& groups = target_->optimizer->param_groups();
  for (size_t i = 0; i < momenta.size(); ++i) *MomentumOf(groups[i].options()) = momenta[i];
}

const std::vector<double>& ScheduledOptimizer::initial_rates() const {
  auto& initial = target_->initial_rates;
  const std::vector<double> now = rates();
  for (size_t i = initial.size(); i < now.size(); ++i) initial.push_back(now[i]);
  return initial;
}

void ScheduledOptimizer::set_initial_rates(std::vector<double> rates) const {
  target_->RequireOneForEachGroup(rates.size());
  target_->initial_rates = std::move(rates);
}

}  // namespace ddp::train
