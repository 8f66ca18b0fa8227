#include "train/schedulers/composed_schedulers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "train/schedulers/schedulers.h"

namespace ddp::train {

namespace {

using internal::Require;

using Schedulers = std::vector<std::shared_ptr<LRScheduler>>;

Schedulers Checked(Schedulers schedulers, const ScheduledOptimizer& optimizer,
                   const std::string& kind) {
  Require(!schedulers.empty(), kind + ": there is no scheduler");
  for (size_t i = 0; i < schedulers.size(); ++i) {
    const std::string which = kind + ": scheduler " + std::to_string(i);
    Require(schedulers[i] != nullptr, which + " is null");
    Require(schedulers[i]->optimizer() == optimizer,
            which +
                " was made over another ScheduledOptimizer; make one, and all schedulers over "
                "it");
  }
  return schedulers;
}

std::string PartName(size_t i) { return "schedulers/" + std::to_string(i); }

void SaveParts(const Schedulers& schedulers, SavedState& state) {
  for (size_t i = 0; i < schedulers.size(); ++i) {
    state.add_part(PartName(i), schedulers[i]->save_state());
  }
}

void LoadParts(const Schedulers& schedulers, const SavedState& state) {
  for (size_t i = 0; i < schedulers.size(); ++i) schedulers[i]->load_state(state.part(PartName(i)));
}

// Returns true for a scheduler that has no formula for its step 0.
bool IsComposed(const LRScheduler& scheduler) {
  return dynamic_cast<const SequentialLR*>(&scheduler) != nullptr ||
         dynamic_cast<const ChainedScheduler*>(&scheduler) != nullptr;
}

}  // namespace

SequentialLR::SequentialLR(ScheduledOptimizer optimizer,
                           std::vector<std::shared_ptr<LRScheduler>> schedulers,
                           std::vector<int64_t> milestones)
    : LRScheduler(optimizer, "SequentialLR"),
      schedulers_(Checked(std::move(schedulers), optimizer, "SequentialLR")),
      milestones_(std::move(milestones)) {
  Require(milestones_.size() + 1 == schedulers_.size(),
          "SequentialLR: there are " + std::to_string(schedulers_.size()) + " schedulers and " +
              std::to_string(milestones_.size()) +
              " milestones; give one milestone less than schedulers");
  Require(std::is_sorted(milestones_.begin(), milestones_.end()),
          "SequentialLR: the milestones are not in ascending order");
  for (size_t i = 1; i < schedulers_.size(); ++i) {
    Require(!IsComposed(*schedulers_[i]), "SequentialLR: scheduler " + std::to_string(i) +
                                              " is a SequentialLR or a ChainedScheduler; only the "
                                              "first may be");
  }
  set_last_epoch(0);
  apply(optimizer.initial_rates());
  undo_initial_step();
  LRScheduler& first = *schedulers_[Current()];
  first.initial_step();
  apply(first.get_last_lr());
}

size_t SequentialLR::Current() const {
  return std::upper_bound(milestones_.begin(), milestones_.end(), last_epoch()) -
         milestones_.begin();
}

void SequentialLR::step() {
  set_last_epoch(last_epoch() + 1);
  const size_t current = Current();
  LRScheduler& scheduler = *schedulers_[current];
  if (current > 0 && milestones_[current - 1] == last_epoch()) {
    scheduler.restart();
  } else {
    scheduler.step();
  }
  apply(scheduler.get_last_lr());
}

std::vector<double> SequentialLR::get_lr() { return schedulers_[Current()]->get_last_lr(); }

void SequentialLR::undo_initial_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_initial_step();
}

SavedState SequentialLR::save_state() const {
  SavedState state = LRScheduler::save_state();
  SaveParts(schedulers_, state);
  return state;
}

void SequentialLR::load_state(const SavedState& state) {
  LoadParts(schedulers_, state);
  LRScheduler::load_state(state);
}

ChainedScheduler::ChainedScheduler(ScheduledOptimizer optimizer,
                                   std::vector<std::shared_ptr<LRScheduler>> schedulers)
    : LRScheduler(optimizer, "ChainedScheduler"),
      schedulers_(Checked(std::move(schedulers), optimizer, "ChainedScheduler")) {
  set_last_epoch(0);
}

void ChainedScheduler::step() {
  for (const auto& scheduler : schedulers_) scheduler->step();
  set_last_epoch(last_epoch() + 1);
  apply(get_lr());
}

std::vector<double> ChainedScheduler::get_lr() { return optimizer().rates(); }

void ChainedScheduler::undo_initial_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_initial_step();
}

SavedState ChainedScheduler::save_state() const {
  SavedState state = LRScheduler::save_state();
  SaveParts(schedulers_, state);
  return state;
}

void ChainedScheduler::load_state(const SavedState& state) {
  LoadParts(schedulers_, state);
  LRScheduler::load_state(state);
}

std::shared_ptr<SequentialLR> warmup_then(ScheduledOptimizer optimizer, WarmupOptions options,
                                          std::shared_ptr<LRScheduler> next) {
  Require(options.steps >= 1,
          "warmup_then: steps is " + std::to_string(options.steps) + ", it must be at least 1");
  const double start = options.start_factor.value_or(1.0 / options.steps);
  std::shared_ptr<LRScheduler> warmup;
  if (options.kind == WarmupOptions::Kind::kConstant) {
    warmup = std::make_shared<ConstantLR>(
        optimizer, ConstantLROptions{.factor = start, .total_iters = options.steps});
  } else {
    warmup = std::make_shared<LinearLR>(
        optimizer, LinearLROptions{.start_factor = start, .total_iters = options.steps});
  }
  return std::make_shared<SequentialLR>(optimizer, Schedulers{std::move(warmup), std::move(next)},
                                        std::vector{options.steps});
}

}  // namespace ddp::train
