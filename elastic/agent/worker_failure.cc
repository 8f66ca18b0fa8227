#include "elastic/agent/worker_failure.h"

#include <string.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace ddp::elastic {

std::string DescribeFailure(const WorkerFailure& failure) {
  return failure.instead.empty() ? DescribeExit(failure.status) : failure.instead;
}

int ShellExitCode(const ExitStatus& status) {
  constexpr int kSignalOffset = 128;
  return status.signal != 0 ? kSignalOffset + status.signal : status.exit_code;
}

std::string SignalName(int signal) {
  const char* abbreviation = sigabbrev_np(signal);
  if (abbreviation == nullptr) return absl::StrCat("signal ", signal);
  return absl::StrCat("SIG", abbreviation);
}

std::string DescribeExit(const ExitStatus& status) {
  const std::string end = status.signal != 0
                              ? absl::StrCat("was killed by ", SignalName(status.signal))
                              : absl::StrCat("exited with code ", status.exit_code);
  return status.cause.empty() ? end : absl::StrCat(end, ", ", status.cause);
}

}  // namespace ddp::elastic
