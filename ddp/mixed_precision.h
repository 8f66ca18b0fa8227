#ifndef DDP_MIXED_PRECISION_H_
#define DDP_MIXED_PRECISION_H_

#include <optional>

#include <c10/core/ScalarType.h>

#include "ddp/option.h"

namespace ddp {

// Forward and backward in a lower precision, the optimizer's step in full; PyTorch's
// _MixedPrecision. Only floating-point tensors are converted. What the module holds outside of
// forward and backward, and so every checkpoint and optimizer, has full-precision parameters and
// gradients.
//
// The gradients of parameters become full-precision numbers one by one, as they are computed, and
// accumulate in full precision. (PyTorch accumulates in param_dtype.)
struct MixedPrecision {
  using Self = MixedPrecision;

  // The type of parameters in forward and backward. Unset: as they are.
  DDP_OPTION(param_dtype, std::optional<c10::ScalarType>) = {};

  // The type in which gradients travel and are summed. Unset: param_dtype, or as they are.
  DDP_OPTION(reduce_dtype, std::optional<c10::ScalarType>) = {};

  // The type of buffers, converted once and for all when the model is wrapped. Batch norms want the
  // type of their parameters here.
  DDP_OPTION(buffer_dtype, std::optional<c10::ScalarType>) = {};

  // Inputs of the module are converted to param_dtype. Without it the module has to do so.
  DDP_OPTION(cast_forward_inputs, bool) = true;

  // The type in which gradients are reduced, if not their own.
  std::optional<c10::ScalarType> reduction_dtype() const {
    return reduce_dtype.has_value() ? reduce_dtype() : param_dtype();
  }
};

}  // namespace ddp

#endif  // DDP_MIXED_PRECISION_H_
