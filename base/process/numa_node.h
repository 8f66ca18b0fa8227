#ifndef DDP_BASE_PROCESS_NUMA_NODE_H_
#define DDP_BASE_PROCESS_NUMA_NODE_H_

#include <sched.h>

#include <string>

namespace ddp {

// Returns the NUMA node of all `cores`. -1 when they have several, or the kernel names none. `root`
// is a prefix of /sys, for tests.
int NumaNodeOf(const cpu_set_t& cores, const std::string& root = "");

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_NUMA_NODE_H_
