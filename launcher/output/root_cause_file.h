#ifndef DDP_LAUNCHER_OUTPUT_ROOT_CAUSE_FILE_H_
#define DDP_LAUNCHER_OUTPUT_ROOT_CAUSE_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {

// Writes the error file of the root cause to `path`, in torchrun's form. The process that started
// ddprun named `path` in ddprun's own TORCHELASTIC_ERROR_FILE. The worker's exit code (minus N for
// signal N) is added as "errorCode" to its "message". For a worker without a usable error file, the
// contents are what the agent knows.
//
// Reads and writes files. Thread: any. Follows no link at `path`. A file that it makes is not
// writable by other users (mode 0644 and the umask). Errors: kInternal, names the file and the
// reason.
absl::Status WriteRootCauseFile(const std::string& path, const elastic::WorkerFailure& root_cause);

// Writes the file for a root cause that is no worker of this node. Only its line of text is known,
// its exit code as a shell has it (0: unknown), and the time when this node learned of it.
absl::Status WriteRootCauseFile(const std::string& path, const std::string& text, int exit_code,
                                absl::Time time);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_ROOT_CAUSE_FILE_H_
