#ifndef DDP_TESTING_ACCELERATOR_SIM_GROUP_H_
#define DDP_TESTING_ACCELERATOR_SIM_GROUP_H_

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "ddp/process_group.h"

namespace ddp::testing {

// For ProcessGroupOptions::make_backend and register_backend(): a group whose ranks have simulated
// devices, the rank's number on its host modulo 2. Makes that device the current one, as the
// library's maker for NCCL does. Requires: InstallAccelerator().
c10::intrusive_ptr<c10d::Backend> ConnectSimulatedDevices(const BackendRequest& request);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_SIM_GROUP_H_
