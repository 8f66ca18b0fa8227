#ifndef DDP_TRAIN_SCHEDULERS_LR_SCHEDULER_H_
#define DDP_TRAIN_SCHEDULERS_LR_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ddp/common/stateful.h"
#include "train/schedulers/scheduled_optimizer.h"

namespace ddp::train {

// The base of all schedulers of learning rates. The names, the meaning and, to the bit, the rates
// are those of torch.optim.lr_scheduler of PyTorch 2.15.
//
//   train::CosineAnnealingLR scheduler(optimizer, {.t_max = 100});
//   for (...) {
//     ...
//     optimizer.step();
//     scheduler.step();
//   }
//
// The constructor sets the rates of step 0. Each step() then sets those of the next one. A step is
// an epoch or a batch, as the program calls it: options named `..._iters`, `step_size` and
// `t_max` count calls of step().
//
// Most schedulers multiply the rate that the optimizer has, so several work on one optimizer, and
// a rate that the program sets by hand stays in effect. They have no value of their own for a group
// that is added later: step() then throws ConfigurationError.
//
// Ranks: a step is no collective. Ranks that make the same scheduler and step it alike have equal
// rates. A ZeroRedundancyOptimizer checks that in its step().
//
// Under a ddp::Join, a rank without inputs does not step its scheduler, and its rates differ from
// the others' after the Join: step it as often as the other ranks, or load_state() of one of those.
//
// Thread-compatible. The optimizer must outlive its schedulers.
class LRScheduler : public Stateful {
 public:
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  // Sets the rates of the next step. Throws ConfigurationError when the optimizer has got another
  // number of parameter groups.
  virtual void step();

  // The rates that this scheduler set last, one for each parameter group.
  const std::vector<double>& get_last_lr() const { return last_lr_; }

  // The number of steps since the construction; 0 after it.
  int64_t last_epoch() const { return last_epoch_; }

  const ScheduledOptimizer& optimizer() const { return optimizer_; }

  // The state has the progress of the schedule and the optimizer's current rates. load_state() sets
  // these rates, so that the order in which an optimizer and its schedulers are loaded does not
  // matter. Options and functions are not part of it: the program gives them to the constructor.
  // (PyTorch restores options from the state as well.)
  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 protected:
  // `kind`: the name of the class, which the state has. A subclass calls initial_step() at the end
  // of its constructor.
  LRScheduler(ScheduledOptimizer optimizer, std::string kind);

  // Returns the rates of last_epoch(), computed from the optimizer's current rates.
  virtual std::vector<double> get_lr() = 0;

  // Returns the rates of last_epoch(), without use of the current ones, where there is a formula.
  // A SequentialLR begins a schedule with it.
  virtual std::vector<double> closed_form_lr() { return get_lr(); }

  // Sets the rates of step 0.
  virtual void initial_step();

  // Takes back the initial step, in the count only.
  virtual void undo_initial_step() { --last_epoch_; }

  // Goes to step 0 of the schedule.
  virtual void restart();

  // Returns true within initial_step().
  bool is_initial() const { return is_initial_; }
  // The number of calls of step() since initial_step(), and that one.
  int64_t step_count() const { return step_count_; }
  // The rate of each group with which the schedule began.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  void set_base_lrs(std::vector<double> rates) { base_lrs_ = std::move(rates); }

  // Returns the product of each current rate and `factor`.
  std::vector<double> times(double factor) const;

  // For subclasses with a step() of their own.
  void set_last_epoch(int64_t epoch) { last_epoch_ = epoch; }
  void apply(const std::vector<double>& rates);

 private:
  friend class ChainedScheduler;
  friend class SequentialLR;

  const ScheduledOptimizer optimizer_;
  const std::string kind_;
  std::vector<double> base_lrs_;
  std::vector<double> last_lr_;
  int64_t last_epoch_ = -1;
  int64_t step_count_ = 0;
  bool is_initial_ = false;
};

namespace internal {

// Throws ConfigurationError with `message` unless `holds`.
void Require(bool holds, const std::string& message);

// Returns one value for each group: `values` itself, or its only value for all of them. Throws
// ConfigurationError, with `name`, when it has another number of values.
std::vector<double> ForEachGroup(const std::string& name, const std::vector<double>& values,
                                 const ScheduledOptimizer& optimizer);

}  // namespace internal

}  // namespace ddp::train

#endif  // DDP_TRAIN_SCHEDULERS_LR_SCHEDULER_H_
