#include "launcher/flags/host_resources.h"

#include <dirent.h>

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
  host.cpus = UsableCores(root);
  host.gpus = CountVisibleGpus(CountGpuDevices(root), visible);
  if (visible.has_value()) {
    const std::vector<std::string> names = absl::StrSplit(*visible, ',', absl::SkipWhitespace());
    host.named_devices = static_cast<int>(names.size());
  }
  return host;
}

}  // namespace ddp::launcher
