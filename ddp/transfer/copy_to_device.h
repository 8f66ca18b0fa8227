#ifndef DDP_TRANSFER_COPY_TO_DEVICE_H_
#define DDP_TRANSFER_COPY_TO_DEVICE_H_

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// Returns `tensor` on `device`; the same tensor when it is there already. A copy from the CPU to a
// GPU runs on a side stream, so that it overlaps with the current stream's work. The current stream
// then waits for the copy. With PYTORCH_DDP_USE_SIDE_STREAM=0 in the environment, the copy runs on
// the current stream. Gradients flow back through the copy.
at::Tensor CopyToDevice(const at::Tensor& tensor, at::Device device);

}  // namespace ddp::internal

#endif  // DDP_TRANSFER_COPY_TO_DEVICE_H_
