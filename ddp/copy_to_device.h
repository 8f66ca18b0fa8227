#ifndef DDP_COPY_TO_DEVICE_H_
#define DDP_COPY_TO_DEVICE_H_

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// `tensor` on `device`; itself where it is there already. A copy from the CPU to a GPU runs on a
// stream of its own, so that it overlaps with what the current stream still does, which then waits
// for it; with PYTORCH_DDP_USE_SIDE_STREAM=0 in the environment it runs on the current stream.
// Gradients flow back through it.
at::Tensor CopyToDevice(const at::Tensor& tensor, at::Device device);

}  // namespace ddp::internal

#endif  // DDP_COPY_TO_DEVICE_H_
