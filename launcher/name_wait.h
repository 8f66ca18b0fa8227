#ifndef DDP_LAUNCHER_NAME_WAIT_H_
#define DDP_LAUNCHER_NAME_WAIT_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// How long a name is waited for that does not resolve yet: a cluster's names may come after its
// machines.
struct NameWaitOptions {
  std::string what;                         // begins every line: "--rdzv-endpoint=node0:29400"
  absl::Duration timeout;                   // since the first look-up
  absl::Duration quiet = absl::Seconds(5);  // after which the user is told what is waited for

  // Tests bring a time of their own. Empty: the real ones.
  std::function<absl::Time()> now;
  std::function<void(absl::Duration)> rest;
  std::function<void(const std::string& line)> say;
};

// Calls `look_up` at once and then, while it returns kUnavailable, again and again with growing
// pauses of at most two seconds. Blocks meanwhile, and a look-up itself may take longer than
// `timeout`: the resolver is not interrupted.
//
// Errors: kDeadlineExceeded when `timeout` is over, with what the last look-up said; others of
// `look_up`, as they are, `what` before them.
absl::Status AwaitName(const NameWaitOptions& options,
                       const std::function<absl::Status()>& look_up);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_NAME_WAIT_H_
