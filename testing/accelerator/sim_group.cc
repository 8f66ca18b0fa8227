#include "testing/accelerator/sim_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/time/time.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_collectives.h"

namespace ddp::testing {

c10::intrusive_ptr<c10d::Backend> ConnectSimulatedDevices(const BackendRequest& request) {
  const c10::Device device = SimulatedDevice(request.local_rank % Runtime::kDevices);
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  auto backend = MakeSimBackend(
      request.store,
      {.rank = request.rank, .size = request.size, .timeout = absl::FromChrono(request.timeout)});
  backend->setBoundDeviceId(device);
  backend->eagerConnectSingleDevice(device);
  return backend;
}

}  // namespace ddp::testing
