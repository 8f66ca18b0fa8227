#include "elastic/worker/run_worker.h"

#include <exception>

#include "elastic/worker/error_file.h"
#include "elastic/worker/fatal_signal.h"

namespace ddp::elastic {

int run_worker(const std::function<int()>& body) {
  install_terminate_handler();
  install_fatal_signal_handlers();
  try {
    return body();
  } catch (...) {
    internal::report_error(std::current_exception());
    return 1;
  }
}

}  // namespace ddp::elastic
