#ifndef DDP_COMMON_TENSOR_FUTURE_H_
#define DDP_COMMON_TENSOR_FUTURE_H_

#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

namespace ddp {

// A future of tensors. Its value is a tensor or a list of tensors, as for c10d's own Work.
using TensorFuture = c10::intrusive_ptr<c10::ivalue::Future>;

namespace internal {

// Returns the devices to construct a future with whose tensors are on `device`. The future orders
// the streams of these devices; the CPU has none.
inline std::vector<c10::Device> FutureDevices(c10::Device device) {
  if (device.is_cpu()) return {};
  return {device};
}

}  // namespace internal

}  // namespace ddp

#endif  // DDP_COMMON_TENSOR_FUTURE_H_
