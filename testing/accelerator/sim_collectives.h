// Collectives of the simulated devices: a c10d backend that behaves as ProcessGroupNCCL does.
//
//   - A collective is enqueued on a stream of the backend's own, after the work of the current
//     stream. The host never blocks, except at the first collective of a device, which connects the
//     ranks: connect eagerly to avoid that.
//   - Work::wait() and synchronize() make the current stream wait; a barrier's wait() blocks the
//     host as well. The work's future is complete at the launch, with the stream's event.
//   - A peer's end makes no wait throw: the stream stays busy until abort(). Work::isCompleted()
//     and exception() tell. abort() leaves the outputs of unfinished collectives as they are.
//   - shutdown() finishes what was launched. The destructor aborts, unless shutdown() came first.
//   - Tensors must be dense, contiguous and on a device. Types that NCCL lacks are refused (int16),
//     and so are sparse tensors.
//   - A message between two ranks has a stream of the pair.
//
// Sums have the bits of ddp's own backends on the CPU.
#ifndef DDP_TESTING_ACCELERATOR_SIM_COLLECTIVES_H_
#define DDP_TESTING_ACCELERATOR_SIM_COLLECTIVES_H_

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"

namespace ddp::testing {

struct SimBackendOptions {
  int rank = 0;
  int size = 1;
  absl::Duration timeout = absl::Minutes(10);  // of connecting, and of shutdown()
};

// Makes the backend "sim" of a rank: a process or a thread of this host. Requires:
// InstallAccelerator().
c10::intrusive_ptr<c10d::Backend> MakeSimBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const SimBackendOptions& options);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_SIM_COLLECTIVES_H_
