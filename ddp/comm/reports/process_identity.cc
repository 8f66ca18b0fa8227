#include "ddp/comm/reports/process_identity.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {
namespace {

struct Stat {
  char state = '?';
  uint64_t start_time = 0;
};

// Reads /proc/<pid>/stat. Its second field, the name in parentheses, may contain any characters.
std::optional<Stat> ReadStat(int64_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::stringstream text;
  text << file.rdbuf();
  const std::string all = text.str();
  const size_t end_of_name = all.rfind(") ");
  if (end_of_name == std::string::npos) return std::nullopt;
  const std::vector<std::string> fields = absl::StrSplit(all.substr(end_of_name + 2), ' ');
  constexpr size_t kStartTime = 19;  // field 22 of the line; the state is field 3
  Stat stat;
  if (fields.size() <= kStartTime || fields[0].size() != 1 ||
      !absl::SimpleAtoi(fields[kStartTime], &stat.start_time)) {
    return std::nullopt;
  }
  stat.state = fields[0][0];
  return stat;
}

}  // namespace

std::optional<ProcessIdentity> ProcessIdentity::OfThisProcess() {
  ProcessIdentity identity;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  struct stat space {};
  const std::optional<Stat> own = ReadStat(::getpid());
  if (!(boot >> identity.boot) || ::stat("/proc/self/ns/pid", &space) != 0 || !own.has_value()) {
    return std::nullopt;
  }
  identity.pid_space = space.st_ino;
  identity.pid = ::getpid();
  identity.start_time = own->start_time;
  return identity;
}

std::string ProcessIdentity::Serialize() const {
  return absl::StrCat(boot, " ", pid_space, " ", pid, " ", start_time);
}

std::optional<ProcessIdentity> ProcessIdentity::Parse(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  ProcessIdentity identity;
  if (words.size() != 4 || words[0].empty() || !absl::SimpleAtoi(words[1], &identity.pid_space) ||
      !absl::SimpleAtoi(words[2], &identity.pid) || identity.pid <= 0 ||
      !absl::SimpleAtoi(words[3], &identity.start_time)) {
    return std::nullopt;
  }
  identity.boot = words[0];
  return identity;
}

bool ProcessIdentity::HasEnded(const ProcessIdentity& observer) const {
  if (boot != observer.boot || pid_space != observer.pid_space) return false;
  if (::kill(static_cast<pid_t>(pid), 0) != 0) return errno == ESRCH;
  // The id may be of a zombie, or of a later process; in both cases this process has ended.
  const std::optional<Stat> now = ReadStat(pid);
  return now.has_value() &&
         (now->state == 'Z' || now->state == 'X' || now->start_time != start_time);
}

}  // namespace ddp::internal
