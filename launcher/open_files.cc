#include "launcher/open_files.h"

#include <glog/logging.h>

#include <algorithm>

namespace ddp::launcher {
namespace {

// Enough for all; some systems allow a thousand million, for which programs make tables.
constexpr rlim_t kEnough = rlim_t{1} << 18;

}  // namespace

rlimit RaiseOpenFiles() {
  rlimit before{};
  PCHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit raised = before;
  raised.rlim_cur = std::max(before.rlim_cur, std::min(before.rlim_max, kEnough));
  PLOG_IF(WARNING, ::setrlimit(RLIMIT_NOFILE, &raised) != 0) << "raising the limit of open files";
  return before;
}

}  // namespace ddp::launcher
