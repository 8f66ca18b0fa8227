#ifndef DDP_TRAIN_SCHEDULERS_SCHEDULED_OPTIMIZER_H_
#define DDP_TRAIN_SCHEDULERS_SCHEDULED_OPTIMIZER_H_

#include <cstddef>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp::train {

// An optimizer and the learning rates with which its schedules begin, one for each parameter group.
// PyTorch keeps these rates in the groups, as `initial_lr`; LibTorch's groups have no such place.
//
// One scheduler alone takes the optimizer itself. Schedulers that work together on one optimizer
// are made over one ScheduledOptimizer, since the first of them changes the optimizer's rates:
//
//   train::ScheduledOptimizer target(optimizer);
//   auto warmup = std::make_shared<train::LinearLR>(target, train::LinearLROptions{});
//   auto decay = std::make_shared<train::ExponentialLR>(target, 0.99);
//   train::SequentialLR schedule(target, {warmup, decay}, {5});
//
// Copies are the same ScheduledOptimizer. The optimizer must outlive them. Any torch::optim::
// Optimizer works, a ZeroRedundancyOptimizer too; every rank makes the same schedulers.
class ScheduledOptimizer {
 public:
  ScheduledOptimizer(torch::optim::Optimizer& optimizer);  // NOLINT: implicit by intention

  // The number of parameter groups.
  size_t size() const;

  // The current learning rate of each group. Throws c10::Error when the optimizer's options have
  // none.
  std::vector<double> rates() const;
  // Sets them. Throws ConfigurationError when their number is not that of the groups.
  void set_rates(const std::vector<double>& rates) const;

  // Returns true when each group has a momentum or betas.
  bool has_momentum() const;
  // The momentum of each group, or the first of its betas. Requires has_momentum().
  std::vector<double> momenta() const;
  // Sets them. As set_rates().
  void set_momenta(const std::vector<double>& momenta) const;

  // The rates with which schedules begin: of each group, its rate when a scheduler first asked.
  const std::vector<double>& initial_rates() const;
  // Replaces them, as OneCycleLR does.
  void set_initial_rates(std::vector<double> rates) const;

  bool operator==(const ScheduledOptimizer& other) const = default;

 private:
  struct Target;

  std::shared_ptr<Target> target_;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_SCHEDULERS_SCHEDULED_OPTIMIZER_H_
