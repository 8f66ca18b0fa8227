#ifndef DDP_MIXED_PRECISION_H_
#define DDP_MIXED_PRECISION_H_

#include <optional>

#include <c10/core/ScalarType.h>

namespace ddp {

// Options for a lower precision in forward and backward, with optimizer steps in full precision;
// PyTorch's _MixedPrecision. Only floating-point tensors are converted. Outside of forward and
// backward the module has full-precision parameters and gradients. Checkpoints and optimizers
// therefore use full precision.
//
// Each parameter's gradient is converted to full precision when it is computed, and accumulates in
// full precision. (PyTorch accumulates in param_dtype.)
struct MixedPrecision {
  // The type of parameters in forward and backward. Unset: unchanged.
  std::optional<c10::ScalarType> param_dtype = {};

  // The type in which gradients are sent and summed. Unset: param_dtype, or unchanged if that is
  // unset.
  std::optional<c10::ScalarType> reduce_dtype = {};

  // The type of buffers, converted once when the model is wrapped. A batch norm needs buffers of
  // the type that its parameters have in the forward.
  std::optional<c10::ScalarType> buffer_dtype = {};

  // When true, the module's inputs are converted to param_dtype. When false, the module must
  // convert them itself.
  bool cast_forward_inputs = true;

  // Returns the type in which gradients are reduced; nullopt: their own type.
  std::optional<c10::ScalarType> reduction_dtype() const {
    return reduce_dtype.has_value() ? reduce_dtype : param_dtype;
  }
};

}  // namespace ddp

#endif  // DDP_MIXED_PRECISION_H_
