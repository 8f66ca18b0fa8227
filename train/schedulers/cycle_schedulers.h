// Schedulers that change the momentum with the learning rate: see lr_scheduler.h.
#ifndef DDP_TRAIN_SCHEDULERS_CYCLE_SCHEDULERS_H_
#define DDP_TRAIN_SCHEDULERS_CYCLE_SCHEDULERS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "train/schedulers/lr_scheduler.h"

namespace ddp::train {

// Vectors have one value, or one for each parameter group.
struct OneCycleLROptions {
  enum class Anneal : uint8_t { kCos, kLinear };

  std::vector<double> max_lr = {};  // the highest rate
  int64_t total_steps = 0;          // of the cycle; 0: epochs * steps_per_epoch
  int64_t epochs = 0;
  int64_t steps_per_epoch = 0;
  double pct_start = 0.3;  // the share of the steps in which the rate rises, in [0, 1]
  Anneal anneal_strategy = Anneal::kCos;
  // Whether the momentum, or the first beta, falls while the rate rises, and the reverse. Needs an
  // optimizer that has one.
  bool cycle_momentum = true;
  std::vector<double> base_momentum = {0.85};  // the lowest momentum
  std::vector<double> max_momentum = {0.95};   // the highest
  double div_factor = 25.0;                    // max_lr / the initial rate
  double final_div_factor = 1e4;               // the initial rate / the last rate
  bool three_phase = false;  // true: back to the initial rate first, then down to the last one
};

// One cycle: up to max_lr, and down below the initial rate ("1cycle", Smith and Topin 2018; in the
// form of fastai, or of the paper with three_phase). It sets the initial rate, too. Step it after
// each batch. Throws ConfigurationError when an option is out of range, when the optimizer has no
// momentum to cycle, and in step() after total_steps.
class OneCycleLR final : public LRScheduler {
 public:
  OneCycleLR(ScheduledOptimizer optimizer, OneCycleLROptions options);

  void step() override;

 protected:
  std::vector<double> get_lr() override;

 private:
  // The range of each group in one part of the cycle.
  struct Phase {
    double end_step = 0;
    std::vector<double> start_lr, end_lr;
    std::vector<double> start_momentum, end_momentum;
  };

  double Anneal(double start, double end, double share) const;

  const OneCycleLROptions options_;
  int64_t total_steps_ = 0;
  std::vector<Phase> phases_;
};

// Vectors have one value, or one for each parameter group.
struct CyclicLROptions {
  enum class Mode : uint8_t {
    kTriangular,   // all cycles alike
    kTriangular2,  // the height of each cycle is half of the one before
    kExpRange,     // the height is gamma ^ step
  };
  enum class ScaleMode : uint8_t { kCycle, kIterations };

  std::vector<double> base_lr = {};           // the lowest rate
  std::vector<double> max_lr = {};            // the highest rate of a cycle of height 1
  double step_size_up = 2000;                 // steps from the lowest to the highest, > 0
  std::optional<double> step_size_down = {};  // and back, >= 0; unset: as step_size_up
  Mode mode = Mode::kTriangular;
  double gamma = 1.0;  // of kExpRange
  // The height of a cycle instead of that of `mode`, of the cycle's number from 1 on, or of the
  // step: see scale_mode.
  std::function<double(double)> scale_fn = nullptr;
  ScaleMode scale_mode = ScaleMode::kCycle;  // what scale_fn gets
  // Whether the momentum, or the first beta, falls while the rate rises, and the reverse. Needs an
  // optimizer that has one.
  bool cycle_momentum = true;
  std::vector<double> base_momentum = {0.8};  // the lowest momentum
  std::vector<double> max_momentum = {0.9};   // the highest
};

// Lets the rate rise and fall between two bounds (Smith, WACV 2017). Step it after each batch.
// Throws ConfigurationError when an option is out of range, and when the optimizer has no momentum
// to cycle.
class CyclicLR final : public LRScheduler {
 public:
  CyclicLR(ScheduledOptimizer optimizer, CyclicLROptions options);

 protected:
  std::vector<double> get_lr() override;

 private:
  double Scale(double cycle) const;

  CyclicLROptions options_;
  double total_size_ = 0;
  double step_ratio_ = 0;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_SCHEDULERS_CYCLE_SCHEDULERS_H_
