#ifndef DDP_LAUNCHER_WORKER_COMMAND_H_
#define DDP_LAUNCHER_WORKER_COMMAND_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/launch_options.h"

namespace ddp::launcher {

// What the user asked for and what the environment says about it.
struct ProgramRequest {
  ProgramKind kind = ProgramKind::kByName;
  std::vector<std::string> program;        // PROGRAM and its arguments; never empty
  std::optional<std::string> python_exec;  // $PYTHON_EXEC; empty counts as unset
  std::optional<std::string> path;         // $PATH
};

// The argv of a worker, `${local_rank}` still in it (the agent knows the number). A Python module,
// or a script, which is one by flag or by the `.py` at its end, runs under $PYTHON_EXEC, else
// python3, with -u; anything else is executed itself. argv[0] is the path of a file that exists and
// may be executed, so that a mistake is found before any process is started.
//
// Looks at files, changes nothing; any thread. Errors, one line each that names the file:
// kNotFound (no such program, script or interpreter), kPermissionDenied (it is no executable
// file; says what to do).
absl::StatusOr<std::vector<std::string>> WorkerCommand(const ProgramRequest& request);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_WORKER_COMMAND_H_
