#ifndef DDP_TESTING_ACCELERATOR_DEVICE_ALLOCATOR_H_
#define DDP_TESTING_ACCELERATOR_DEVICE_ALLOCATOR_H_

#include <c10/core/Allocator.h>

namespace ddp::testing {

// Returns the allocator of device memory: on the current device, for its current stream. Lives as
// long as the process.
c10::Allocator* MakeDeviceAllocator();

// Returns the allocator of pinned memory. Likewise.
c10::Allocator* MakePinnedAllocator();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_DEVICE_ALLOCATOR_H_
