#ifndef DDP_TRAIN_SCHEDULERS_REDUCE_LR_ON_PLATEAU_H_
#define DDP_TRAIN_SCHEDULERS_REDUCE_LR_ON_PLATEAU_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/common/stateful.h"
#include "train/schedulers/scheduled_optimizer.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::train {

struct ReduceLROnPlateauOptions {
  enum class Mode : uint8_t { kMin, kMax };           // whether less or more is better
  enum class ThresholdMode : uint8_t { kRel, kAbs };  // whether threshold is a share of the best

  Mode mode = Mode::kMin;
  double factor = 0.1;      // of each reduction, less than 1
  int64_t patience = 10;    // steps without an improvement that are tolerated
  double threshold = 1e-4;  // an improvement is larger than this
  ThresholdMode threshold_mode = ThresholdMode::kRel;
  int64_t cooldown = 0;              // steps after a reduction in which nothing is counted
  std::vector<double> min_lr = {0};  // the lowest rate: one value, or one for each group
  double eps = 1e-8;                 // a smaller change of a rate is left out

  // When set, step() takes the mean of the metric over the ranks of this group, so that all ranks
  // decide alike. When not set, the program gives the same metric on every rank, such as
  // training.mean_loss(): ranks that decide differently train with different rates.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

// Reduces the rate when a metric has stopped to improve: torch.optim.lr_scheduler.ReduceLROnPlateau
// of PyTorch 2.15, to the bit.
//
//   train::ReduceLROnPlateau scheduler(optimizer, {.patience = 5, .group = group});
//   ...
//   scheduler.step(validation_loss);  // after each validation
//
// It has no schedule of its own, so it may work beside an LRScheduler, but not within one.
// Thread-compatible. The optimizer must outlive it.
class ReduceLROnPlateau final : public Stateful {
 public:
  // Throws ConfigurationError when factor is 1 or more, and when min_lr has another number of
  // values than 1 and that of the groups.
  ReduceLROnPlateau(ScheduledOptimizer optimizer, ReduceLROnPlateauOptions options);

  // Judges the metric of the last epoch. NaN is no improvement. With options.group: a collective of
  // one number, which throws what a collective throws; on a device the host waits for it.
  // Throws ConfigurationError when the optimizer has got another number of parameter groups and
  // min_lr has one for each.
  void step(double metric);

  // The rates after the last step(), one for each parameter group.
  const std::vector<double>& get_last_lr() const { return last_lr_; }

  // The best metric so far, as it was agreed; infinite before the first step().
  double best() const { return best_; }
  int64_t num_bad_epochs() const { return num_bad_epochs_; }

  // As of LRScheduler.
  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 private:
  double Agreed(double metric) const;
  bool IsBetter(double metric) const;
  void Reduce();

  const ScheduledOptimizer optimizer_;
  const ReduceLROnPlateauOptions options_;
  std::vector<double> last_lr_;
  double best_;
  int64_t last_epoch_ = 0;
  int64_t num_bad_epochs_ = 0;
  int64_t cooldown_counter_ = 0;  // steps of the cooldown that are left
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_SCHEDULERS_REDUCE_LR_ON_PLATEAU_H_
