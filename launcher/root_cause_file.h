#ifndef DDP_LAUNCHER_ROOT_CAUSE_FILE_H_
#define DDP_LAUNCHER_ROOT_CAUSE_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {

// Writes what ended the job to `path`, which whoever started ddprun named in ddprun's own
// TORCHELASTIC_ERROR_FILE: the error file of the worker that is the root cause, in torchrun's form
// and with the worker's exit code (minus N for signal N) as "errorCode" in its "message". Of a
// worker that wrote none, or one that cannot be used, what the agent knows.
//
// Reads and writes files; any thread. Follows no link at `path`, and gives no other user the right
// to write a file that it makes. Errors: kInternal, names the file and the reason.
absl::Status WriteRootCauseFile(const std::string& path, const elastic::WorkerFailure& root_cause);

// The same of a root cause that is no worker of this node, of which no more is known than a line,
// the exit code as a shell has it (0: not even that) and when it was heard of here.
absl::Status WriteRootCauseFile(const std::string& path, const std::string& text, int exit_code,
                                absl::Time time);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_ROOT_CAUSE_FILE_H_
