#ifndef DDP_REDUCER_BUCKETS_GRADIENT_CHECK_H_
#define DDP_REDUCER_BUCKETS_GRADIENT_CHECK_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include "ddp/common/logging.h"

namespace ddp::internal {

// Throws c10::TypeError when `gradient` is not of the parameter's type, or is sparse. Logs a
// warning, seldom, when the gradient is part of a graph (create_graph): the average is not.
inline void CheckDenseGradient(const at::Tensor& gradient, const at::Tensor& parameter) {
  TORCH_CHECK_TYPE(gradient.layout() == at::kStrided,
                   "got a sparse gradient where a dense one was expected: only an Embedding or "
                   "EmbeddingBag with sparse=true may have one");
  TORCH_CHECK_TYPE(gradient.scalar_type() == parameter.scalar_type(),
                   "expected a gradient of type ", parameter.scalar_type(), ", got ",
                   gradient.scalar_type());
  if (gradient.requires_grad()) {
    LOG_EVERY_N(WARNING, 1000)
        << "a backward with create_graph is reduced: the averaged gradients are cut off from the "
           "graph, and gradients of gradients are not averaged";
  }
}

// Throws c10::TypeError when `gradient` is dense.
inline void CheckSparseGradient(const at::Tensor& gradient) {
  TORCH_CHECK_TYPE(
      gradient.is_sparse(),
      "got a dense gradient where an embedding with sparse=true promised a sparse one");
}

// Returns a coalesced sparse gradient of zeros.
inline at::Tensor SparseZeros(const at::Tensor& parameter) {
  const at::Tensor indices =
      at::empty({1, 0}, at::TensorOptions().dtype(at::kLong).device(parameter.device()));
  std::vector<int64_t> shape = parameter.sizes().vec();
  shape[0] = 0;
  return at::sparse_coo_tensor(indices, at::empty(shape, parameter.options()), parameter.sizes())
      .coalesce();
}

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_GRADIENT_CHECK_H_
