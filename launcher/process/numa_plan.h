#ifndef DDP_LAUNCHER_PROCESS_NUMA_PLAN_H_
#define DDP_LAUNCHER_PROCESS_NUMA_PLAN_H_

#include <vector>

#include "absl/status/statusor.h"
#include "launcher/process/cpu_topology.h"

namespace ddp::launcher {

// CPUs that a worker may run on, as --numa-binding names them.
enum class NumaBinding {
  kNone,         // all CPUs of this process
  kNode,         // all CPUs of its home node
  kSocket,       // all CPUs of the socket of its home node
  kExclusive,    // equal part of the cores of its home node, not shared
  kCoreComplex,  // CPUs of its home node that share one largest cache; larger groups first
};

// Returns the CPUs of each local rank, by id; empty for kNone, or if `topology` has no CPU.
//
// The home node of a local rank is the NUMA node of its GPU: the GPU of the same index, modulo the
// number of GPUs. Without a GPU, or if that node is unknown or has no CPU for this process, local
// ranks are spread over the nodes in order.
//
// Pure. Errors: kInvalidArgument (kExclusive with fewer cores than workers; names the node).
absl::StatusOr<std::vector<std::vector<int>>> PlanNuma(const CpuTopology& topology,
                                                       NumaBinding binding, int nproc);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_NUMA_PLAN_H_
