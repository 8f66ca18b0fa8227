#include "base/process/control_group.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp {
namespace {

// Returns the path of the group in the hierarchy of `controller`; "" as the controller means the
// hierarchy of version 2. A line is "4:cpu,cpuacct:/pod/c", in version 2 "0::/pod/c".
std::optional<std::string> PathOf(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> names = absl::StrSplit(parts[1], ',');
    if (std::find(names.begin(), names.end(), controller) != names.end()) return parts[2];
  }
  return std::nullopt;
}

// The mount of a hierarchy.
struct Mount {
  std::string group;   // the group whose folder is mounted
  std::string folder;  // where
};

// Finds the mount of the hierarchy as PathOf() does. A line is "31 25 0:28 GROUP FOLDER OPTIONS
// [FIELD]... - TYPE SOURCE OPTIONS".
std::optional<Mount> MountOf(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> mount = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> kind = absl::StrSplit(halves[1], ' ');
    if (mount.size() < 5 || kind.size() < 3) continue;
    const std::vector<std::string> options = absl::StrSplit(kind[2], ',');
    const bool found = controller.empty()
                           ? kind[0] == "cgroup2"
                           : kind[0] == "cgroup" && std::find(options.begin(), options.end(),
                                                              controller) != options.end();
    if (found) return Mount{mount[3], mount[4]};
  }
  return std::nullopt;
}

// Returns the folders from `path` outwards.
std::vector<std::string> Folders(const Mount& mount, std::string path, const std::string& root) {
  // A container may see its group as the top without a namespace of its own. A path outside the
  // mount ("/..", or a group of the host) cannot be seen: the mounted group is then the nearest.
  if (mount.group != "/") {
    const bool inside = path == mount.group || absl::StartsWith(path, mount.group + "/");
    path = inside ? path.substr(mount.group.size()) : "";
  }
  if (absl::StrContains(path, "..")) path.clear();
  std::vector<std::string> folders;
  for (; !path.empty() && path != "/"; path.resize(path.rfind('/'))) {
    folders.push_back(absl::StrCat(root, mount.folder, path));
  }
  folders.push_back(absl::StrCat(root, mount.folder));
  return folders;
}

}  // namespace

ControlGroup FindControlGroup(const std::string& controller, const std::string& root) {
  const std::optional<std::string> path1 = PathOf(controller, root);
  const std::string hierarchy = path1.has_value() ? controller : "";
  const std::optional<std::string> path = path1.has_value() ? path1 : PathOf("", root);
  const std::optional<Mount> mount = MountOf(hierarchy, root);
  if (!path.has_value() || !mount.has_value()) return {};
  return {path1.has_value() ? 1 : 2, Folders(*mount, *path, root)};
}

}  // namespace ddp
