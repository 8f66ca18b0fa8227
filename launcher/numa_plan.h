#ifndef DDP_LAUNCHER_NUMA_PLAN_H_
#define DDP_LAUNCHER_NUMA_PLAN_H_

#include <vector>

#include "absl/status/statusor.h"
#include "launcher/cpu_topology.h"

namespace ddp::launcher {

// Which CPUs a worker may run on, as --numa-binding names it.
enum class NumaBinding {
  kNone,         // all of ours
  kNode,         // those of its home node
  kSocket,       // those of the socket that its home node is in
  kExclusive,    // its own share of the cores of its home node, of even sizes
  kCoreComplex,  // those that share one largest cache in its home node; the larger ones first
};

// The CPUs of each local rank, by id; empty for kNone.
//
// The home node of a local rank is that of its GPU, which is the one of the same index, counted
// round again where there are fewer. Where that is not known, local ranks are spread over the
// nodes in order.
//
// Pure. Errors: kInvalidArgument (kExclusive with fewer cores than workers; says where).
absl::StatusOr<std::vector<std::vector<int>>> PlanNuma(const CpuTopology& topology,
                                                       NumaBinding binding, int nproc);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_NUMA_PLAN_H_
