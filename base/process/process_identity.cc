#include "base/process/process_identity.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/process/process_state.h"
#include "base/text_fields.h"

namespace ddp {
namespace {

// The start time of a process is field 22; empty when /proc does not tell.
std::string StartTime(const std::vector<std::string>& fields) {
  return fields.size() > 19 ? fields[19] : std::string();
}

}  // namespace

std::string ProcessIdentity() {
  std::string boot;
  struct stat space {};
  const std::string start_time = StartTime(ProcessStat(::getpid()));
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> boot) ||
      ::stat("/proc/self/ns/pid", &space) != 0 || start_time.empty()) {
    return std::string();
  }
  return absl::StrCat(boot, " ", space.st_ino, " ", ::getpid(), " ", start_time);
}

bool ProcessHasEnded(const std::string& identity) {
  std::string boot, pid_space;
  pid_t pid = 0;
  int64_t start_time = 0;
  if (!ReadFields(identity, ' ', boot, pid_space, pid, start_time) || pid <= 0 ||
      !absl::StartsWith(ProcessIdentity(), absl::StrCat(boot, " ", pid_space, " "))) {
    return false;
  }
  if (::kill(pid, 0) != 0) return errno == ESRCH;
  // The id may be of a zombie, or of a later process; in both cases this process has ended.
  const std::vector<std::string> now = ProcessStat(pid);
  return !StartTime(now).empty() &&
         (now[0] == "Z" || now[0] == "X" || StartTime(now) != absl::StrCat(start_time));
}

}  // namespace ddp
