#ifndef DDP_COMM_SHARED_MEMORY_REGISTERED_MEMORY_H_
#define DDP_COMM_SHARED_MEMORY_REGISTERED_MEMORY_H_

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// Returns an uninitialized tensor of `count` elements in the arena of this process, where the other
// ranks of the host can read and write it. The memory belongs to the tensor, and is given back with
// it. When the arena has no room, or is too small a tensor for it, the tensor is an ordinary one.
at::Tensor AllocateRegistered(int64_t count, const at::TensorOptions& options);

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_REGISTERED_MEMORY_H_
