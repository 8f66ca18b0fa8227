#include "launcher/process/numa_plan.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

using Cpu = CpuTopology::Cpu;
using CpuIds = std::vector<int>;

template <typename Predicate>
CpuIds Select(const CpuTopology& topology, Predicate predicate) {
  CpuIds ids;
  for (const Cpu& cpu : topology.cpus) {
    if (predicate(cpu)) ids.push_back(cpu.id);
  }
  return ids;
}

// Returns the home node of each local rank.
std::vector<int> HomeNodes(const CpuTopology& topology, int nproc) {
  std::set<int> distinct;
  for (const Cpu& cpu : topology.cpus) distinct.insert(cpu.node);
  const std::vector<int> nodes(distinct.begin(), distinct.end());
  std::vector<int> homes;
  for (size_t rank = 0; rank < static_cast<size_t>(nproc); ++rank) {
    const size_t gpus = topology.gpu_nodes.size();
    const int node = gpus == 0 ? -1 : topology.gpu_nodes[rank % gpus];
    const bool is_known = distinct.count(node) != 0;
    homes.push_back(is_known ? node : nodes[rank * nodes.size() / static_cast<size_t>(nproc)]);
  }
  return homes;
}

// Returns the CPUs of one home node in groups that have the same `key`, in the order of the keys.
template <typename Key>
std::vector<CpuIds> Groups(const CpuTopology& topology, int node, Key key) {
  std::map<int, CpuIds> groups;
  for (const Cpu& cpu : topology.cpus) {
    if (cpu.node == node) groups[key(cpu)].push_back(cpu.id);
  }
  std::vector<CpuIds> result;
  for (auto& [value, cpus] : groups) result.push_back(std::move(cpus));
  return result;
}

// Returns the share of the `index`-th of `count` workers of a node.
absl::StatusOr<CpuIds> ExclusiveShare(const CpuTopology& topology, int node, size_t index,
                                      size_t count) {
  const std::vector<CpuIds> cores = Groups(topology, node, [](const Cpu& cpu) { return cpu.core; });
  if (cores.size() < count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--numa-binding=exclusive: ", count, " workers have their home on NUMA node ", node,
        ", which has ", cores.size(), " cores; start fewer workers or use --numa-binding=node"));
  }
  CpuIds share;
  for (size_t core = index * cores.size() / count; core < (index + 1) * cores.size() / count;
       ++core) {
    share.insert(share.end(), cores[core].begin(), cores[core].end());
  }
  std::sort(share.begin(), share.end());
  return share;
}

CpuIds CoreComplex(const CpuTopology& topology, int node, size_t index) {
  std::vector<CpuIds> complexes = Groups(topology, node, [](const Cpu& cpu) { return cpu.cache; });
  std::stable_sort(complexes.begin(), complexes.end(),
                   [](const CpuIds& a, const CpuIds& b) { return a.size() > b.size(); });
  return complexes[index % complexes.size()];
}

int SocketOf(const CpuTopology& topology, int node) {
  return std::find_if(topology.cpus.begin(), topology.cpus.end(),
                      [node](const Cpu& cpu) { return cpu.node == node; })
      ->socket;
}

}  // namespace

absl::StatusOr<std::vector<std::vector<int>>> PlanNuma(const CpuTopology& topology,
                                                       NumaBinding binding, int nproc) {
  std::vector<CpuIds> plan;
  if (binding == NumaBinding::kNone || topology.cpus.empty()) return plan;
  const std::vector<int> homes = HomeNodes(topology, nproc);
  std::map<int, size_t> seen;  // number of workers so far, by home node
  for (const int node : homes) {
    const size_t index = seen[node]++;
    const auto count = static_cast<size_t>(std::count(homes.begin(), homes.end(), node));
    switch (binding) {
      case NumaBinding::kNone:
        break;
      case NumaBinding::kNode:
        plan.push_back(Select(topology, [node](const Cpu& cpu) { return cpu.node == node; }));
        break;
      case NumaBinding::kSocket: {
        const int socket = SocketOf(topology, node);
        plan.push_back(Select(topology, [socket](const Cpu& cpu) { return cpu.socket == socket; }));
        break;
      }
      case NumaBinding::kExclusive: {
        DDP_ASSIGN_OR_RETURN(CpuIds share, ExclusiveShare(topology, node, index, count));
        plan.push_back(std::move(share));
        break;
      }
      case NumaBinding::kCoreComplex:
        plan.push_back(CoreComplex(topology, node, index));
        break;
    }
  }
  return plan;
}

}  // namespace ddp::launcher
