#include "elastic/worker/run_worker.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>

#include "base/environment.h"
#include "elastic/worker/error_file.h"
#include "elastic/worker/fatal_signal.h"
#include "elastic/worker/kept_memory.h"

namespace ddp::elastic {
namespace {

// Beyond RLIMIT_FSIZE (ulimit -f) a write then fails with EFBIG, which fails one checkpoint. The
// signal would end the worker. A handler of the program stays.
void IgnoreFileSizeSignal() {
  struct sigaction action {};
  if (::sigaction(SIGXFSZ, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGXFSZ, &action, nullptr);
}

int RunBody(const std::function<int()>& body) {
  try {
    return body();
  } catch (...) {
    internal::report_error(std::current_exception());
    return 1;
  }
}

}  // namespace

int run_worker(const std::function<int()>& body, const RunOptions& options) {
  install_terminate_handler();
  install_fatal_signal_handlers();
  IgnoreFileSizeSignal();
  if (options.keep_freed_memory) internal::KeepFreedMemory(&EnvironmentVariable);
  const int result = RunBody(body);
  if (!options.exit_at_once) return result;
  std::cout.flush();
  std::cerr.flush();
  std::clog.flush();
  std::fflush(nullptr);
  _exit(result);
}

}  // namespace ddp::elastic
