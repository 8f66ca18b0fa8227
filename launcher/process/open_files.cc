#include "launcher/process/open_files.h"

#include <glog/logging.h>

#include <algorithm>

namespace ddp::launcher {
namespace {

// Limit that is enough for every job. Some systems allow a thousand million, and programs make
// tables of that size.
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
