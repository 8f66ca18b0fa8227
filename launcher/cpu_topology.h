#ifndef DDP_LAUNCHER_CPU_TOPOLOGY_H_
#define DDP_LAUNCHER_CPU_TOPOLOGY_H_

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// How the CPUs of this host, and its GPUs, lie to each other.
struct CpuTopology {
  struct Cpu {
    int id = 0;
    int node = 0;    // of memory (NUMA)
    int socket = 0;  // package
    int core = 0;    // the lowest CPU of the same core
    int cache = 0;   // the lowest CPU that shares its largest cache
  };
  std::vector<Cpu> cpus;       // that we may run on, by id
  std::vector<int> gpu_nodes;  // of each GPU that workers see, in their order; -1: not known
};

// Where a topology is read.
struct TopologySource {
  std::string root;       // before /sys, /proc and /dev; empty on a real host
  std::set<int> allowed;  // CPUs that this process may run on
  std::optional<std::string> cuda_visible_devices;
};

// Reads it from /sys/devices/system and, for NVIDIA's GPUs, from /sys/bus/pci and the driver's
// /proc/driver/nvidia. GPUs are counted in the order of their PCI addresses, as CUDA does among
// equal ones. A kernel without NUMA has one node. Nothing is started or asked of a driver.
//
// Errors: kNotFound, kInvalidArgument; name the file that is missing or makes no sense.
absl::StatusOr<CpuTopology> ReadCpuTopology(const TopologySource& source);

// The same for this host and process.
absl::StatusOr<CpuTopology> ReadCpuTopologyOfThisHost();

// The numbers in the kernel's "0-3,8". Errors: kInvalidArgument.
absl::StatusOr<std::vector<int>> ParseCpuList(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_CPU_TOPOLOGY_H_
