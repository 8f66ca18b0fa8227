#include "base/detached_thread.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>

#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/blocked_signals.h"

namespace ddp {

absl::Status StartDetachedThread(const std::string& name, std::function<void()> body) {
  const BlockedSignals blocked;
  absl::Status started;
  try {
    std::thread([name, body = std::move(body)] {
      prctl(PR_SET_NAME, name.c_str());
      body();
    }).detach();
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    const char* const hint = code == EAGAIN
                                 ? " (a limit of processes, pids.max or ulimit -u, may be reached)"
                             : code == EPERM ? " (a filter of system calls may refuse clone3)"
                                             : "";
    started = absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread: pthread_create: ", strerror(code), hint));
  }
  return started;
}

}  // namespace ddp
