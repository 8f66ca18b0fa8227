#include "launcher/flags/stop_times.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

constexpr auto kMaxFlagMilliseconds = static_cast<int64_t>(kMaxFlagSeconds) * 1000;

}  // namespace

absl::Status ReadStopTimes(const FlagReader& flags, const HostResources& host,
                           elastic::AgentTimes& times) {
  DDP_ASSIGN_OR_RETURN(times.fault_grace,
                       flags.Milliseconds("fault-grace-ms", {0, kMaxFlagMilliseconds}));
  DDP_ASSIGN_OR_RETURN(times.shutdown_timeout, flags.Seconds("shutdown-timeout"));
  if (flags.IsGiven("termination-grace")) {
    DDP_ASSIGN_OR_RETURN(times.termination_grace, flags.Seconds("termination-grace"));
    if (times.termination_grace <= absl::ZeroDuration()) {
      return flags.BadValue("termination-grace", "expected seconds above 0");
    }
  } else if (host.is_kubernetes_pod && !flags.IsGiven("shutdown-timeout")) {
    // The default of terminationGracePeriodSeconds is as long as that of the timeout.
    const elastic::AgentTimes in_pod = {.termination_grace = times.shutdown_timeout};
    times.shutdown_timeout = in_pod.WorkersShareOfGrace();
  }
  DDP_ASSIGN_OR_RETURN(times.kill_timeout, flags.Seconds("kill-timeout"));
  if (times.kill_timeout <= absl::ZeroDuration()) {
    return flags.BadValue("kill-timeout", "expected seconds above 0");
  }
  double uninterruptible_s = 0;
  if (!absl::SimpleAtod(flags.Text("uninterruptible-timeout"), &uninterruptible_s) ||
      !(uninterruptible_s <= kMaxFlagSeconds)) {
    return flags.BadValue("uninterruptible-timeout", "expected seconds; 0 or less: never");
  }
  // A negative number is torchrun's way to say never.
  times.uninterruptible_timeout = absl::Seconds(std::max(0.0, uninterruptible_s));
  DDP_ASSIGN_OR_RETURN(times.stuck_timeout, flags.Seconds("stuck-timeout"));
  DDP_ASSIGN_OR_RETURN(times.exit_barrier_timeout, flags.Seconds("exit-barrier-timeout"));
  return absl::OkStatus();
}

}  // namespace ddp::launcher
