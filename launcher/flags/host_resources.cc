#include "launcher/flags/host_resources.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/process/cpu_quota.h"

namespace ddp::launcher {
namespace {

int CountAllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  // sched_getaffinity() fails when there are more CPUs than a cpu_set_t holds.
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

// Rounds a quota down: two ranks on 1.5 cores would both stand still for a quarter of the time.
int CountCpus(const std::string& root) {
  const double quota = CpuQuota(root);
  return std::max(1, static_cast<int>(std::min<double>(CountAllowedCpus(), quota)));
}

int CountGpuDevices(const std::string& root) {
  const std::string devices = root + "/dev";
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(devices.c_str()), &closedir);
  if (folder == nullptr) return 0;
  int count = 0;
  while (const dirent* entry = readdir(folder.get())) {
    const std::string name = entry->d_name;
    if (name.rfind("nvidia", 0) != 0 || name.size() == 6) continue;
    count += std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return isdigit(c); });
  }
  return count;
}

}  // namespace

int CountVisibleGpus(int devices, const std::optional<std::string>& cuda_visible_devices) {
  if (!cuda_visible_devices.has_value()) return devices;
  int count = 0;
  for (const absl::string_view entry : absl::StrSplit(*cuda_visible_devices, ',')) {
    const std::string name(absl::StripAsciiWhitespace(entry));
    const bool is_name = name.rfind("GPU-", 0) == 0 || name.rfind("MIG-", 0) == 0;
    int index = -1;
    if (!is_name && (!absl::SimpleAtoi(name, &index) || index < 0 || index >= devices)) break;
    ++count;
  }
  return devices == 0 ? 0 : count;
}

HostResources ReadHostResources(const std::string& root) {
  std::optional<std::string> visible;
  if (const char* value = std::getenv("CUDA_VISIBLE_DEVICES")) visible = value;
  HostResources host;
  host.is_kubernetes_pod = std::getenv("KUBERNETES_SERVICE_HOST") != nullptr;
  host.cpus = CountCpus(root);
  host.gpus = CountVisibleGpus(CountGpuDevices(root), visible);
  if (visible.has_value()) {
    const std::vector<std::string> names = absl::StrSplit(*visible, ',', absl::SkipWhitespace());
    host.named_devices = static_cast<int>(names.size());
  }
  return host;
}

}  // namespace ddp::launcher
