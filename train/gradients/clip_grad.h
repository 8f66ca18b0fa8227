// Limits of gradients: torch.nn.utils.clip_grad of PyTorch 2.15. Call the functions between the
// backward and the optimizer's step. Parameters without a gradient are left out. No host
// synchronization, unless error_if_nonfinite asks for one.
//
// Averaged gradients are equal on all ranks, and so are their norms: these functions are then no
// collectives. Gradients that a ZeroRedundancyOptimizer has scattered are clipped by its own
// clip_grad_norm().
//
// All functions throw ConfigurationError when a gradient is sparse. Thread-compatible.
#ifndef DDP_TRAIN_GRADIENTS_CLIP_GRAD_H_
#define DDP_TRAIN_GRADIENTS_CLIP_GRAD_H_

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::train {

// A norm of gradients is infinite or NaN.
class NonFiniteGradientError : public c10::Error {
 public:
  explicit NonFiniteGradientError(const std::string& message) : c10::Error(message, nullptr) {}
};

struct ClipGradOptions {
  // The order of the norm: 1, 2, infinity or any other that linalg_vector_norm has.
  double norm_type = 2.0;

  // When true, a norm that is infinite or NaN throws NonFiniteGradientError, before any gradient is
  // changed; the host then waits for a device. When false, it becomes the factor of all gradients.
  bool error_if_nonfinite = false;

  // Set it when each rank of this group has other parameters, or other parts of them: the norm is
  // then that of the parts of all ranks, and the call is a collective of one number. On every rank
  // the same norm comes out, also on one without a gradient.
  std::shared_ptr<ProcessGroup> shards_of = nullptr;
};

// Scales all gradients so that their common norm is at most `max_norm`, and returns the norm
// before: a tensor of one element on the gradients' device; of shards_of where there is none.
// Throws NonFiniteGradientError as error_if_nonfinite says, and what a collective throws.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipGradOptions& options = {});

// The two halves of clip_grad_norm_(): the norm, and the scaling by it. With several norms of parts
// of a model, combine them between.
at::Tensor get_total_norm(const std::vector<at::Tensor>& parameters,
                          const ClipGradOptions& options = {});
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm);

// Limits each element of all gradients to [-clip_value, clip_value].
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace ddp::train

#endif  // DDP_TRAIN_GRADIENTS_CLIP_GRAD_H_
