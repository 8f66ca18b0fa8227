#ifndef DDP_LAUNCHER_PROCESS_CPU_TOPOLOGY_H_
#define DDP_LAUNCHER_PROCESS_CPU_TOPOLOGY_H_

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// CPUs and GPUs of this host, and the NUMA nodes, sockets, cores and caches that they belong to.
struct CpuTopology {
  struct Cpu {
    int id = 0;
    int node = 0;    // NUMA node
    int socket = 0;  // physical package
    int core = 0;    // lowest CPU of the same core
    int cache = 0;   // lowest CPU that shares its largest cache
  };
  std::vector<Cpu> cpus;  // CPUs that this process may run on, by id
  std::vector<int>
      gpu_nodes;  // NUMA node of each GPU that workers see, in their order; -1: not known
};

// Input of ReadCpuTopology(); tests give an invented host.
struct TopologySource {
  std::string root;       // prefix of /sys, /proc and /dev; empty on a real host
  std::set<int> allowed;  // CPUs that this process may run on
  std::optional<std::string> cuda_visible_devices;
};

// Reads the topology from /sys/devices/system. NVIDIA GPUs come from /sys/bus/pci and the driver's
// /proc/driver/nvidia, in the order of their PCI addresses, as CUDA orders equal GPUs. A kernel
// without NUMA has one node. No process is started and no driver is called.
//
// Errors: kNotFound (a file is missing, or no CPU of `allowed` is online), kInvalidArgument (a file
// is malformed); the message names the file.
absl::StatusOr<CpuTopology> ReadCpuTopology(const TopologySource& source);

// Reads the topology of this host and process. Errors: also kNotFound when the affinity is unknown.
absl::StatusOr<CpuTopology> ReadCpuTopologyOfThisHost();

// Returns the numbers in the kernel's list format "0-3,8", sorted, each once. Errors:
// kInvalidArgument.
absl::StatusOr<std::vector<int>> ParseCpuList(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_CPU_TOPOLOGY_H_
