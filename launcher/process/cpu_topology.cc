#include "launcher/process/cpu_topology.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

constexpr int kMaxCpu = 1 << 16;
constexpr size_t kMaxFileBytes = 64 << 10;
constexpr int kUnknownNode = -1;

// Returns the first 64 KiB of a file, without blanks around them; nullopt when it cannot be read.
std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text(kMaxFileBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return std::string(absl::StripAsciiWhitespace(text));
}

std::vector<std::string> ListFolder(const std::string& path) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path.c_str()), &::closedir);
  if (folder == nullptr) return names;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::vector<int>> ReadCpuList(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path);
  if (!text.has_value()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  absl::StatusOr<std::vector<int>> list = ParseCpuList(*text);
  if (list.ok()) return list;
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", list.status().message()));
}

absl::StatusOr<int> ReadInteger(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path);
  int value = 0;
  if (!text.has_value()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  if (!absl::SimpleAtoi(*text, &value)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no number"));
  }
  return value;
}

// Returns the lowest CPU in the list at `path`; `cpu` itself when there is no list.
int LowestIn(const std::string& path, int cpu) {
  const absl::StatusOr<std::vector<int>> list = ReadCpuList(path);
  return list.ok() && !list->empty() ? list->front() : cpu;
}

// Returns the lowest CPU that shares the highest level of cache with `cpu`.
int CacheOf(const std::string& folder, int cpu) {
  int best_level = 0;
  int lowest = cpu;
  for (const std::string& index : ListFolder(folder)) {
    if (!absl::StartsWith(index, "index")) continue;
    const absl::StatusOr<int> level = ReadInteger(absl::StrCat(folder, "/", index, "/level"));
    if (!level.ok() || *level <= best_level) continue;
    best_level = *level;
    lowest = LowestIn(absl::StrCat(folder, "/", index, "/shared_cpu_list"), cpu);
  }
  return lowest;
}

absl::StatusOr<std::map<int, int>> NodesOfCpus(const std::string& system) {
  std::map<int, int> nodes;
  for (const std::string& name : ListFolder(system + "/node")) {
    int node = 0;
    if (!absl::StartsWith(name, "node") || !absl::SimpleAtoi(name.substr(4), &node)) continue;
    DDP_ASSIGN_OR_RETURN(const std::vector<int> cpus,
                         ReadCpuList(absl::StrCat(system, "/node/", name, "/cpulist")));
    for (const int cpu : cpus) nodes[cpu] = node;
  }
  return nodes;
}

absl::Status ReadCpus(const TopologySource& source, CpuTopology& topology) {
  const std::string system = source.root + "/sys/devices/system";
  DDP_ASSIGN_OR_RETURN(const std::vector<int> online, ReadCpuList(system + "/cpu/online"));
  DDP_ASSIGN_OR_RETURN(const auto nodes, NodesOfCpus(system));
  for (const int id : online) {
    if (source.allowed.count(id) == 0) continue;
    const std::string folder = absl::StrCat(system, "/cpu/cpu", id);
    CpuTopology::Cpu cpu;
    cpu.id = id;
    const auto node = nodes.find(id);
    cpu.node = node == nodes.end() ? 0 : node->second;
    DDP_ASSIGN_OR_RETURN(cpu.socket, ReadInteger(folder + "/topology/physical_package_id"));
    cpu.core = LowestIn(folder + "/topology/thread_siblings_list", id);
    cpu.cache = CacheOf(folder + "/cache", id);
    topology.cpus.push_back(cpu);
  }
  if (!topology.cpus.empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(system, "/cpu/online: names no CPU that we may run on"));
}

struct Gpu {
  std::string uuid;
  int node = kUnknownNode;
};

// Returns the text behind `key:` in the driver's file about a GPU.
std::string FieldOf(const std::string& text, const std::string& key) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (const std::string& line : lines) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || absl::StripAsciiWhitespace(line.substr(0, colon)) != key) {
      continue;
    }
    return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  return "";
}

// Returns the GPUs that the driver runs and whose device this process can see.
std::vector<Gpu> ReadGpus(const std::string& root) {
  std::vector<Gpu> gpus;
  for (const std::string& address : ListFolder(root + "/proc/driver/nvidia/gpus")) {
    const std::optional<std::string> information =
        ReadFile(absl::StrCat(root, "/proc/driver/nvidia/gpus/", address, "/information"));
    if (!information.has_value()) continue;
    const std::string minor = FieldOf(*information, "Device Minor");
    if (::access(absl::StrCat(root, "/dev/nvidia", minor).c_str(), F_OK) != 0) continue;
    Gpu gpu;
    gpu.uuid = FieldOf(*information, "GPU UUID");
    gpu.node = ReadInteger(absl::StrCat(root, "/sys/bus/pci/devices/", address, "/numa_node"))
                   .value_or(kUnknownNode);
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

// Returns the NUMA nodes of the GPUs that CUDA_VISIBLE_DEVICES lets a worker see, in its order.
std::vector<int> VisibleNodes(const std::vector<Gpu>& gpus,
                              const std::optional<std::string>& visible) {
  std::vector<int> nodes;
  if (!visible.has_value()) {
    for (const Gpu& gpu : gpus) nodes.push_back(gpu.node);
    return nodes;
  }
  const std::vector<std::string> entries = absl::StrSplit(*visible, ',');
  for (const std::string& entry : entries) {
    const std::string name(absl::StripAsciiWhitespace(entry));
    uint32_t index = 0;
    if (absl::StartsWith(name, "GPU-")) {
      const auto gpu = std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& candidate) {
        return absl::StartsWith(candidate.uuid, name);
      });
      nodes.push_back(gpu == gpus.end() ? kUnknownNode : gpu->node);
    } else if (absl::StartsWith(name, "MIG-")) {
      nodes.push_back(kUnknownNode);
    } else if (absl::SimpleAtoi(name, &index) && index < gpus.size()) {
      nodes.push_back(gpus[index].node);
    } else {
      break;  // CUDA sees no device behind one that does not exist
    }
  }
  return nodes;
}

}  // namespace

absl::StatusOr<std::vector<int>> ParseCpuList(const std::string& text) {
  std::vector<int> cpus;
  if (text.empty()) return cpus;
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  for (const std::string& part : parts) {
    const std::vector<std::string> ends = absl::StrSplit(part, '-');
    int first = 0;
    int last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first || last > kMaxCpu) {
      return absl::InvalidArgumentError(absl::StrCat("'", part, "' is no list of CPUs"));
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

absl::StatusOr<CpuTopology> ReadCpuTopology(const TopologySource& source) {
  CpuTopology topology;
  DDP_RETURN_IF_ERROR(ReadCpus(source, topology));
  topology.gpu_nodes = VisibleNodes(ReadGpus(source.root), source.cuda_visible_devices);
  return topology;
}

absl::StatusOr<CpuTopology> ReadCpuTopologyOfThisHost() {
  TopologySource source;
  // Large enough for any kernel: a mask that is too small is an error.
  std::vector<unsigned long> mask(static_cast<size_t>(kMaxCpu) / (8 * sizeof(unsigned long)));
  const size_t bytes = mask.size() * sizeof(mask[0]);
  auto* set = reinterpret_cast<cpu_set_t*>(mask.data());
  if (::sched_getaffinity(0, bytes, set) != 0) {
    return absl::NotFoundError("sched_getaffinity does not tell our CPUs");
  }
  for (int cpu = 0; cpu < kMaxCpu; ++cpu) {
    if (CPU_ISSET_S(cpu, bytes, set)) source.allowed.insert(cpu);
  }
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    source.cuda_visible_devices = visible;
  }
  return ReadCpuTopology(source);
}

}  // namespace ddp::launcher
