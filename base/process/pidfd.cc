#include "base/process/pidfd.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ddp {

// System calls by number: glibc 2.35 and older has no functions for them.
UniqueFd OpenPidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

bool SignalPidfd(int pidfd, pid_t pid, int signal) {
  if (syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0) == 0) return true;
  if (errno == ESRCH || errno == EBADF || errno == EINVAL) return false;
  pollfd ended = {.fd = pidfd, .events = POLLIN, .revents = 0};
  const int ready = poll(&ended, 1, 0);
  if (ready == 1) errno = ESRCH;
  return ready == 0 && kill(pid, signal) == 0;
}

}  // namespace ddp
