#ifndef DDP_REDUCER_BUCKETS_GRADIENT_CHECK_H_
#define DDP_REDUCER_BUCKETS_GRADIENT_CHECK_H_

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// Throws c10::TypeError when `gradient` is not of the parameter's type, or is sparse. Logs a
// warning, seldom, when the gradient is part of a graph (create_graph): the average is not.
void CheckDenseGradient(const at::Tensor& gradient, const at::Tensor& parameter);

// Throws c10::TypeError when `gradient` is dense.
void CheckSparseGradient(const at::Tensor& gradient);

// Returns a coalesced sparse gradient of zeros.
at::Tensor SparseZeros(const at::Tensor& parameter);

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_GRADIENT_CHECK_H_
