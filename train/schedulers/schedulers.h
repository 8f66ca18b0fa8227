// The schedulers of torch.optim.lr_scheduler that have no cycle of momentum: see lr_scheduler.h.
// Constructors throw ConfigurationError when an option is out of the range that stands beside it.
#ifndef DDP_TRAIN_SCHEDULERS_SCHEDULERS_H_
#define DDP_TRAIN_SCHEDULERS_SCHEDULERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "train/schedulers/lr_scheduler.h"

namespace ddp::train {

// A factor of a learning rate as a function of the step. Deterministic: every rank calls it.
using LRLambda = std::function<double(int64_t epoch)>;

// The initial rate times the factor of the step.
class LambdaLR final : public LRScheduler {
 public:
  // One function for all parameter groups, or one for each.
  LambdaLR(ScheduledOptimizer optimizer, LRLambda lambda);
  LambdaLR(ScheduledOptimizer optimizer, std::vector<LRLambda> lambdas);

 protected:
  std::vector<double> get_lr() override;

 private:
  const std::vector<LRLambda> lambdas_;
};

// The current rate times the factor of the step, from step 1 on.
class MultiplicativeLR final : public LRScheduler {
 public:
  // One function for all parameter groups, or one for each.
  MultiplicativeLR(ScheduledOptimizer optimizer, LRLambda lambda);
  MultiplicativeLR(ScheduledOptimizer optimizer, std::vector<LRLambda> lambdas);

 protected:
  std::vector<double> get_lr() override;

 private:
  const std::vector<LRLambda> lambdas_;
};

struct StepLROptions {
  int64_t step_size = 0;  // steps between two decays, >= 1
  double gamma = 0.1;     // factor of each decay
};

// Multiplies the rate by gamma every step_size steps.
class StepLR final : public LRScheduler {
 public:
  StepLR(ScheduledOptimizer optimizer, StepLROptions options);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  const StepLROptions options_;
};

struct MultiStepLROptions {
  std::vector<int64_t> milestones = {};  // steps of a decay, in any order; twice: two decays
  double gamma = 0.1;                    // factor of each decay
};

// Multiplies the rate by gamma at each milestone.
class MultiStepLR final : public LRScheduler {
 public:
  MultiStepLR(ScheduledOptimizer optimizer, const MultiStepLROptions& options);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  std::map<int64_t, int64_t> milestones_;  // step -> decays
  const double gamma_;
};

struct ConstantLROptions {
  double factor = 1.0 / 3;  // in (0, 1]
  int64_t total_iters = 5;  // steps with the factor, >= 0
};

// Multiplies the rate by a factor, until total_iters steps have passed.
class ConstantLR final : public LRScheduler {
 public:
  ConstantLR(ScheduledOptimizer optimizer, ConstantLROptions options);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  const ConstantLROptions options_;
};

struct LinearLROptions {
  double start_factor = 1.0 / 3;  // in (0, 1]
  double end_factor = 1.0;        // in [0, 1]
  int64_t total_iters = 5;        // steps from the one factor to the other, >= 1
};

// Multiplies the rate by a factor that changes linearly within total_iters steps.
class LinearLR final : public LRScheduler {
 public:
  LinearLR(ScheduledOptimizer optimizer, LinearLROptions options);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  const LinearLROptions options_;
};

// Multiplies the rate by gamma at every step.
class ExponentialLR final : public LRScheduler {
 public:
  ExponentialLR(ScheduledOptimizer optimizer, double gamma);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  const double gamma_;
};

struct PolynomialLROptions {
  int64_t total_iters = 5;  // steps until the rate is 0, >= 1
  double power = 1.0;       // >= 0
};

// Lets the rate fall to 0 within total_iters steps, as (1 - step / total_iters) ^ power.
class PolynomialLR final : public LRScheduler {
 public:
  PolynomialLR(ScheduledOptimizer optimizer, PolynomialLROptions options);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  const PolynomialLROptions options_;
};

struct CosineAnnealingLROptions {
  int64_t t_max = 0;     // steps from the initial rate to the lowest, >= 1; PyTorch's T_max
  double eta_min = 0.0;  // the lowest rate
};

// Lets the rate fall to eta_min along half a cosine within t_max steps, then rise again, and so on.
// The cosine of SGDR (Loshchilov and Hutter, ICLR 2017) without its restarts.
class CosineAnnealingLR final : public LRScheduler {
 public:
  CosineAnnealingLR(ScheduledOptimizer optimizer, CosineAnnealingLROptions options);

 protected:
  std::vector<double> get_lr() override;
  std::vector<double> closed_form_lr() override;

 private:
  const CosineAnnealingLROptions options_;
};

struct CosineAnnealingWarmRestartsOptions {
  int64_t t_0 = 0;       // steps of the first cycle, >= 1; PyTorch's T_0
  int64_t t_mult = 1;    // factor of the length of each next cycle, >= 1; PyTorch's T_mult
  double eta_min = 0.0;  // the lowest rate
};

// Lets the rate fall to eta_min along half a cosine, then starts again at the initial rate: SGDR
// (Loshchilov and Hutter, ICLR 2017).
class CosineAnnealingWarmRestarts final : public LRScheduler {
 public:
  CosineAnnealingWarmRestarts(ScheduledOptimizer optimizer,
                              CosineAnnealingWarmRestartsOptions options);

  void step() override;

  // Goes to a point in time, in steps; a fraction is allowed: epoch + batch / batches of an epoch,
  // after each batch. Throws ConfigurationError when it is negative.
  void step(double epoch);

  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 protected:
  std::vector<double> get_lr() override;

 private:
  const CosineAnnealingWarmRestartsOptions options_;
  double in_cycle_ = -1;  // steps since the cycle began
  int64_t cycle_;         // steps of the cycle
};

struct SWALROptions {
  enum class Anneal : uint8_t { kCos, kLinear };

  std::vector<double> swa_lr = {};  // the rate at the end: one value, or one for each group
  int64_t anneal_epochs = 10;       // steps from the current rate to swa_lr, >= 0
  Anneal anneal_strategy = Anneal::kCos;
};

// Brings the rate to that of stochastic weight averaging, and leaves it there:
// torch.optim.swa_utils. SWALR. See train/averaging/averaged_model.h.
class SWALR final : public LRScheduler {
 public:
  SWALR(ScheduledOptimizer optimizer, SWALROptions options);

 protected:
  std::vector<double> get_lr() override;

 private:
  double ShareAt(int64_t step) const;

  SWALROptions options_;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_SCHEDULERS_SCHEDULERS_H_
