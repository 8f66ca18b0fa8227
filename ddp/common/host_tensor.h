#ifndef DDP_COMMON_HOST_TENSOR_H_
#define DDP_COMMON_HOST_TENSOR_H_

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace ddp::internal {

// Returns a new tensor of the host whose copy to `device` does not block the host.
inline at::Tensor HostTensorFor(at::Device device, int64_t count, at::ScalarType type) {
  return at::empty({count}, at::TensorOptions(type).pinned_memory(!device.is_cpu()));
}

}  // namespace ddp::internal

#endif  // DDP_COMMON_HOST_TENSOR_H_
