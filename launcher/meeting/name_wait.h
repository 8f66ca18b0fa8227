#ifndef DDP_LAUNCHER_MEETING_NAME_WAIT_H_
#define DDP_LAUNCHER_MEETING_NAME_WAIT_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// Options of the wait for a name that does not resolve yet: a cluster's names may appear after its
// machines.
struct NameWaitOptions {
  std::string what;                         // start of every message: "--rdzv-endpoint=node0:29400"
  absl::Duration timeout;                   // longest wait, from the first look-up
  absl::Duration quiet = absl::Seconds(5);  // time after which a line tells the user about the wait

  // Clock, sleep and output of tests. Empty: the real ones.
  std::function<absl::Time()> now;
  std::function<void(absl::Duration)> rest;
  std::function<void(const std::string& line)> say;
};

// Calls `look_up` at once, and again while it returns kUnavailable, with growing pauses of at most
// two seconds. Blocks until `look_up` succeeds, fails otherwise, or `timeout` is over. A look-up
// may itself exceed `timeout`: the resolver is not interrupted.
//
// Errors: kDeadlineExceeded (`timeout` is over), with the message of the last look-up. Other errors
// of `look_up` keep their code, with `what` before the message.
absl::Status AwaitName(const NameWaitOptions& options,
                       const std::function<absl::Status()>& look_up);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_NAME_WAIT_H_
