#ifndef DDP_TESTING_ACCELERATOR_DEFAULT_DEVICE_H_
#define DDP_TESTING_ACCELERATOR_DEFAULT_DEVICE_H_

#include <c10/core/Device.h>

namespace ddp::testing {

// Makes torch::ones(), torch::empty() and the like, called without a device, return tensors on
// `device`, for the life of the process: as torch.set_default_device() of Python. So modules and
// the tensors of a test are on the device, and a test that was written for the CPU runs there.
//
// at::ones() and the like go on to return tensors on the CPU: library code makes the host's own
// tensors with them. torch::tensor() and torch::from_blob() do too.
void SetDefaultDevice(c10::Device device);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_DEFAULT_DEVICE_H_
