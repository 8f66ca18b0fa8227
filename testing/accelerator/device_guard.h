#ifndef DDP_TESTING_ACCELERATOR_DEVICE_GUARD_H_
#define DDP_TESTING_ACCELERATOR_DEVICE_GUARD_H_

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace ddp::testing {

// Returns LibTorch's interface to devices, streams and events: c10::DeviceGuard, c10::StreamGuard,
// c10::Event and at::accelerator call it. A thread begins on device 0 and on the default streams.
// The object lives as long as the process.
c10::impl::DeviceGuardImplInterface* MakeDeviceGuard();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_DEVICE_GUARD_H_
