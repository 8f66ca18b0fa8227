#ifndef DDP_TESTING_ACCELERATOR_DEVICE_HOOKS_H_
#define DDP_TESTING_ACCELERATOR_DEVICE_HOOKS_H_

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace ddp::testing {

// Returns what LibTorch asks of an accelerator: at::getAccelerator() and at::accelerator, pinned
// memory, the default generators, storages that grow. Lives as long as the process.
at::PrivateUse1HooksInterface* MakeDeviceHooks();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_DEVICE_HOOKS_H_
