// Schedulers made of others: see lr_scheduler.h. All of them are made over one ScheduledOptimizer;
// constructors throw ConfigurationError when they are not, and when one is null.
#ifndef DDP_TRAIN_SCHEDULERS_COMPOSED_SCHEDULERS_H_
#define DDP_TRAIN_SCHEDULERS_COMPOSED_SCHEDULERS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "train/schedulers/lr_scheduler.h"

namespace ddp::train {

// One schedule after the other: schedule i + 1 begins, at its step 0, at milestone i. A schedule
// with a formula for its rates begins with the initial rate; any other one goes on from the rate
// that the optimizer has.
class SequentialLR final : public LRScheduler {
 public:
  // `milestones`: one less than schedulers, ascending. Throws ConfigurationError when their number
  // is another, and when a SequentialLR or a ChainedScheduler is not the first: these have no
  // formula for the step at which they would begin. (PyTorch fails at the milestone.)
  SequentialLR(ScheduledOptimizer optimizer, std::vector<std::shared_ptr<LRScheduler>> schedulers,
               std::vector<int64_t> milestones);

  void step() override;

  // The state has those of all schedulers.
  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 protected:
  std::vector<double> get_lr() override;
  void undo_initial_step() override;

 private:
  // The schedule of the current step.
  size_t Current() const;

  const std::vector<std::shared_ptr<LRScheduler>> schedulers_;
  const std::vector<int64_t> milestones_;
};

// All schedules at once: each step() steps one after the other, and each multiplies the rate that
// the one before has set.
class ChainedScheduler final : public LRScheduler {
 public:
  ChainedScheduler(ScheduledOptimizer optimizer,
                   std::vector<std::shared_ptr<LRScheduler>> schedulers);

  void step() override;

  // The state has those of all schedulers.
  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 protected:
  std::vector<double> get_lr() override;
  void undo_initial_step() override;

 private:
  const std::vector<std::shared_ptr<LRScheduler>> schedulers_;
};

struct WarmupOptions {
  enum class Kind : uint8_t {
    kLinear,    // the rate rises from start_factor times the initial rate to the initial rate
    kConstant,  // the rate is start_factor times the initial rate
  };
  int64_t steps = 0;                        // of the warm-up, >= 1
  std::optional<double> start_factor = {};  // in (0, 1]; unset: 1 / steps
  Kind kind = Kind::kLinear;
};

// Returns a warm-up, and then `next`, which begins after the warm-up's steps: a SequentialLR of a
// LinearLR or a ConstantLR, and `next`. (Not in PyTorch, where a program writes the three.)
//
//   train::ScheduledOptimizer target(optimizer);
//   const auto scheduler = train::warmup_then(
//       target, {.steps = 500},
//       std::make_shared<train::CosineAnnealingLR>(
//           target, train::CosineAnnealingLROptions{.t_max = total_steps - 500}));
std::shared_ptr<SequentialLR> warmup_then(ScheduledOptimizer optimizer, WarmupOptions options,
                                          std::shared_ptr<LRScheduler> next);

}  // namespace ddp::train

#endif  // DDP_TRAIN_SCHEDULERS_COMPOSED_SCHEDULERS_H_
