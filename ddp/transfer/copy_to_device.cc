#include "ddp/transfer/copy_to_device.h"

#include <cstdlib>
#include <string>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddp::internal {
namespace {

bool UseSideStream() {
  const char* value = std::getenv("PYTORCH_DDP_USE_SIDE_STREAM");
  return value == nullptr || std::string(value) == "1";
}

}  // namespace

at::Tensor CopyToDevice(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  if (!at::isAccelerator(device.type()) || !tensor.is_cpu() || !UseSideStream()) {
    return tensor.to(device, /*non_blocking=*/true);
  }
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream current = streams.getStream(device);
  const c10::Stream side = streams.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  at::Tensor copy;
  c10::Event copied(device.type());
  {
    const c10::StreamGuard guard(side);
    copy = tensor.to(device, /*non_blocking=*/true);
    copied.record(side);
  }
  copied.block(current);
  copy.record_stream(current);  // the side stream owns its memory
  return copy;
}

}  // namespace ddp::internal
