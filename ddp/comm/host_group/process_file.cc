#include "ddp/comm/host_group/process_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp::internal {
namespace {

uint64_t PidSpace() {
  struct stat space {};
  return ::stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

// Returns the number of this process in /proc, which may be that of an outer PID namespace.
int32_t PidInProc() {
  std::array<char, 16> number = {};
  (void)::readlink("/proc/self", number.data(), number.size() - 1);
  return std::atoi(number.data());
}

}  // namespace

ProcessFile ProcessFile::Of(int fd) {
  struct stat file {};
  (void)::fstat(fd, &file);
  return {.pid_space = PidSpace(), .inode = file.st_ino, .pid = PidInProc(), .fd = fd};
}

absl::StatusOr<UniqueFd> ProcessFile::Open() const {
  if (pid_space != PidSpace()) {
    return absl::UnavailableError("the processes are in different PID namespaces");
  }
  UniqueFd file(::open(absl::StrCat("/proc/", pid, "/fd/", fd).c_str(), O_RDWR | O_CLOEXEC));
  if (!file.valid()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("opening memory of process ", pid));
  }
  struct stat found {};
  if (::fstat(file.get(), &found) == 0 && found.st_ino == inode) return file;
  return absl::NotFoundError(absl::StrCat("process ", pid, " has closed its memory, or ended"));
}

}  // namespace ddp::internal
