#include "launcher/watch/job_marker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "nlohmann/json.hpp"

namespace ddp::launcher {
namespace {

constexpr char kFileName[] = "job.json";
constexpr size_t kBytesMax = 16 * 1024;
constexpr int kFoldersMax = 10'000;

struct CloseFolder {
  void operator()(DIR* folder) const { ::closedir(folder); }
};

bool IsOursAlone(int fd, mode_t type) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && (info.st_mode & S_IFMT) == type && info.st_uid == ::geteuid() &&
         (info.st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

std::optional<JobMarker> ParseMarker(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto run_id = json.find("run_id");
  const auto instance = json.find("instance");
  const auto endpoint = json.find("endpoint");
  const auto with_credentials = json.find("with_credentials");
  const auto agent_pid = json.find("agent_pid");
  for (const auto& found : {run_id, instance, endpoint, with_credentials, agent_pid}) {
    if (found == json.end()) return std::nullopt;
  }
  const auto password = json.find("password");
  const bool has_password = password != json.end();
  if (has_password && !password->is_string()) return std::nullopt;
  if (!run_id->is_string() || !endpoint->is_string()) return std::nullopt;
  if (!with_credentials->is_boolean()) return std::nullopt;
  if (!instance->is_number_integer() || !agent_pid->is_number_integer()) return std::nullopt;
  return JobMarker{.run_id = run_id->get<std::string>(),
                   .instance = instance->get<int64_t>(),
                   .endpoint = endpoint->get<std::string>(),
                   .with_credentials = with_credentials->get<bool>(),
                   .password = has_password ? password->get<std::string>() : "",
                   .agent_pid = agent_pid->get<pid_t>()};
}

std::optional<JobMarker> ReadMarker(int parent_fd, const char* folder_name) {
  const UniqueFd folder(
      ::openat(parent_fd, folder_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder.valid() || !IsOursAlone(folder.get(), S_IFDIR)) return std::nullopt;
  const UniqueFd file(
      ::openat(folder.get(), kFileName, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.valid() || !IsOursAlone(file.get(), S_IFREG)) return std::nullopt;
  std::array<char, kBytesMax> bytes;
  const ssize_t got = ::read(file.get(), bytes.data(), bytes.size());
  if (got <= 0) return std::nullopt;
  return ParseMarker(std::string(bytes.data(), static_cast<size_t>(got)));
}

bool Runs(pid_t pid) { return pid > 0 && (::kill(pid, 0) == 0 || errno == EPERM); }

}  // namespace

absl::Status WriteJobMarker(const std::string& runtime_folder, const JobMarker& marker) {
  nlohmann::json json = {{"run_id", marker.run_id},
                         {"instance", marker.instance},
                         {"endpoint", marker.endpoint},
                         {"with_credentials", marker.with_credentials},
                         {"agent_pid", marker.agent_pid}};
  if (!marker.password.empty()) json["password"] = marker.password;
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::string path = absl::StrCat(runtime_folder, "/", kFileName);
  // The rename is atomic: `ddprun status` may read the file at any time.
  const std::string draft = path + ".new";
  const UniqueFd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file.valid() ||
      ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::rename(draft.c_str(), path.c_str()) != 0) {
    return absl::InternalError(absl::StrCat("cannot write ", path, ": ", strerror(errno)));
  }
  return absl::OkStatus();
}

std::vector<JobMarker> FindJobMarkers(const std::vector<std::string>& parents) {
  std::vector<JobMarker> markers;
  for (const std::string& parent : parents) {
    const std::unique_ptr<DIR, CloseFolder> folder(::opendir(parent.c_str()));
    if (folder == nullptr) continue;
    int seen = 0;
    while (const dirent* entry = ::readdir(folder.get())) {
      if (!absl::StartsWith(entry->d_name, kRuntimeFolderPrefix)) continue;
      if (++seen > kFoldersMax) break;
      std::optional<JobMarker> marker = ReadMarker(::dirfd(folder.get()), entry->d_name);
      if (marker.has_value() && Runs(marker->agent_pid)) markers.push_back(*std::move(marker));
    }
  }
  std::sort(markers.begin(), markers.end(), [](const JobMarker& a, const JobMarker& b) {
    return std::tie(a.run_id, a.instance, a.agent_pid) <
           std::tie(b.run_id, b.instance, b.agent_pid);
  });
  return markers;
}

std::vector<std::string> RuntimeFolderParents() {
  std::vector<std::string> parents = {"/tmp"};
  const char* tmpdir = std::getenv("TMPDIR");
  if (tmpdir != nullptr && *tmpdir == '/' && parents[0] != tmpdir) parents.push_back(tmpdir);
  return parents;
}

}  // namespace ddp::launcher
