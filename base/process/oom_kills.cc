#include "base/process/oom_kills.h"

#include <fstream>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/process/control_group.h"

namespace ddp {
namespace {

// Returns the number after `key` in a file of lines "KEY NUMBER".
std::optional<int64_t> ReadKey(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  for (int64_t number = 0; file >> name;) {
    if (!(file >> number)) file.clear();
    if (name == key && file) return number;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

// Returns the number that a file holds; nullopt for "max" and a file that cannot be read.
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// Returns "512 MiB".
std::string Mebibytes(int64_t bytes) {
  return absl::StrFormat("%d MiB", (bytes + (1 << 19)) >> 20);
}

// A control group with a limit of memory.
struct Limited {
  std::string folder;
  int64_t limit = 0;
  std::optional<int64_t> peak;  // old kernels of version 2 tell none
  double fullness() const {
    return peak.has_value() ? static_cast<double>(*peak) / static_cast<double>(limit) : 1;
  }
};

// Finds the group that came nearest to its limit, if any came near.
std::optional<Limited> FindFullest(const ControlGroup& group) {
  constexpr int64_t kNoLimit = int64_t{1} << 60;  // version 1 says the highest number of pages
  const bool is_version2 = group.version == 2;
  constexpr double kFull = 0.9;
  std::optional<Limited> fullest;
  for (const std::string& folder : group.folders) {
    const std::optional<int64_t> limit =
        ReadNumber(folder + (is_version2 ? "/memory.max" : "/memory.limit_in_bytes"));
    if (!limit.has_value() || *limit <= 0 || *limit >= kNoLimit) continue;
    const Limited limited = {
        folder, *limit,
        ReadNumber(folder + (is_version2 ? "/memory.peak" : "/memory.max_usage_in_bytes"))};
    if (limited.fullness() > (fullest.has_value() ? fullest->fullness() : kFull)) fullest = limited;
  }
  return fullest;
}

}  // namespace

std::string OomKills::Explain() {
  const std::optional<int64_t> now = Count();
  if (!now.has_value() || !taken_.has_value() || *now <= *taken_) return "";
  ++*taken_;
  const std::optional<Limited> group = FindFullest(FindControlGroup("memory", root_));
  if (group.has_value()) {
    const std::string peak =
        group->peak.has_value() ? absl::StrCat(", its peak was ", Mebibytes(*group->peak)) : "";
    return absl::StrCat("out of memory: the limit of its cgroup ", group->folder, " is ",
                        Mebibytes(group->limit), peak);
  }
  const std::optional<int64_t> kilobytes = ReadKey(root_ + "/proc/meminfo", "MemTotal:");
  const std::string total =
      kilobytes.has_value() ? absl::StrCat(", which has ", Mebibytes(*kilobytes * 1024)) : "";
  return absl::StrCat("out of memory: that of this host", total, " (no cgroup was at its limit)");
}

// The group's own counter: it counts kills for the sake of outer groups and of the host too.
std::optional<int64_t> OomKills::Count() const {
  const ControlGroup group = FindControlGroup("memory", root_);
  if (!group.folders.empty()) {
    const char* const file = group.version == 2 ? "/memory.events" : "/memory.oom_control";
    const std::optional<int64_t> own = ReadKey(group.folders.front() + file, "oom_kill");
    if (own.has_value()) return own;
  }
  return ReadKey(root_ + "/proc/vmstat", "oom_kill");
}

}  // namespace ddp
