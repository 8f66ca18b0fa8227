#include "elastic/worker/run_worker.h"

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
