#ifndef DDP_TRAIN_GRADIENTS_GRAD_SCALER_H_
#define DDP_TRAIN_GRADIENTS_GRAD_SCALER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "ddp/common/stateful.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::train {

struct GradScalerOptions {
  double init_scale = 65536.0;     // > 0
  double growth_factor = 2.0;      // > 1
  double backoff_factor = 0.5;     // in (0, 1)
  int64_t growth_interval = 2000;  // steps without an infinity before the scale grows, >= 1
  bool enabled = true;             // false: scale() and step() do nothing of their own

  // When set, an infinity or NaN in the gradients of one rank counts on all ranks of this group, so
  // that all of them leave the step out and have one scale. One small reduction for each optimizer
  // and step. Averaged gradients are equal on all ranks and need it not. It is needed where ranks
  // keep gradients of their own, as with scattered gradients or a hook that limits values. Not
  // under a ddp::Join, whose ranks make different numbers of steps.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

// Scales losses so that gradients in float16 do not vanish, and the gradients back: torch.amp.
// GradScaler of PyTorch 2.15. Not needed for bfloat16, whose exponents are those of float.
//
//   train::GradScaler scaler({.group = group});
//   ...
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                       // for clipping only
//   train::clip_grad_norm_(model->parameters(), 1);
//   scaler.step(optimizer);                           // left out when a gradient is not finite
//   scaler.update();
//
// The parameters are float32, as under LibTorch's autocast. Several optimizers may step between two
// update(). Thread-compatible.
class GradScaler : public Stateful {
 public:
  // Throws ConfigurationError when an option is out of range.
  explicit GradScaler(GradScalerOptions options = {});

  // Returns the outputs times the scale.
  at::Tensor scale(const at::Tensor& outputs);

  // Divides the gradients of the optimizer's parameters by the scale, and finds out whether all are
  // finite. step() calls it where the program has not. With options.group: a collective. Throws
  // ConfigurationError when it was called before for this optimizer since the last update(), also
  // by step(); when scale() was never called; and when a gradient is float16. Throws what a
  // collective throws.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Steps the optimizer, unless a gradient is not finite, and returns whether it did. With
  // options.group, all ranks return the same. The host waits for a device. Throws
  // ConfigurationError when it was called before for this optimizer since the last update(), and
  // what unscale_() and the optimizer throw.
  bool step(torch::optim::Optimizer& optimizer);

  // Shrinks the scale after a step that was left out; grows it after growth_interval steps that
  // were not. Call it after the last step(). The host does not wait. Throws ConfigurationError
  // when no gradient was checked since the last update().
  void update();
  // Sets the scale.
  void update(double new_scale);

  // The scale; 1 when it is not enabled. The host waits for a device.
  double get_scale() const;
  bool is_enabled() const { return options_.enabled; }

  // The state has the scale and the count of steps; options come from the program.
  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 private:
  // What has been done with an optimizer since the last update().
  struct Progress {
    at::Tensor found_inf;  // 0 or more than 0, on the scale's device
    bool stepped = false;
  };

  // Makes the scale's tensors on `device`, where there are none.
  void MakeScale(at::Device device);
  void RequireScale(const char* function) const;
  at::Tensor FoundInf(torch::optim::Optimizer& optimizer) const;

  const GradScalerOptions options_;
  double first_scale_;         // of tensors that are not made yet
  int64_t first_growth_ = 0;   // as well
  at::Tensor scale_;           // float32; undefined before the first scale()
  at::Tensor growth_tracker_;  // int32: steps since the scale grew or shrank
  std::map<torch::optim::Optimizer*, Progress> progress_;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_GRADIENTS_GRAD_SCALER_H_
