// Reductions of c10d in the words of the kernels, and sums of sparse tensors.
#ifndef DDP_COMM_SHARED_MEMORY_TENSOR_REDUCTION_H_
#define DDP_COMM_SHARED_MEMORY_TENSOR_REDUCTION_H_

#include <cstddef>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "ddp/comm/kernels/element_type.h"

namespace ddp::internal {

// Throws c10::TypeError for a type that is not reduced.
ElementType ElementTypeOf(at::ScalarType type);

// Throws c10::Error for an operation that does not exist for the type.
ReduceKind ReduceKindOf(c10d::ReduceOp::RedOpType op, ElementType type);

std::span<std::byte> BytesOf(const at::Tensor& tensor);

// Returns indices and values of a coalesced tensor as bytes.
at::Tensor BytesOfSparse(const at::Tensor& coalesced);

// Returns the sum over the ranks from `begin` to `end`, in the order of ReduceTree(). Each part
// holds the indices and the values of a coalesced tensor like `mine`.
at::Tensor SumOfSparse(const std::vector<at::Tensor>& parts, const at::Tensor& mine, size_t begin,
                       size_t end);

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_TENSOR_REDUCTION_H_
