#ifndef DDP_LAUNCHER_FLAGS_WORKER_COMMAND_H_
#define DDP_LAUNCHER_FLAGS_WORKER_COMMAND_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/flags/launch_options.h"

namespace ddp::launcher {

// The user's program, and the environment variables that decide how it is run.
struct ProgramRequest {
  ProgramKind kind = ProgramKind::kByName;
  std::vector<std::string> program;        // PROGRAM and its arguments; never empty
  std::optional<std::string> python_exec;  // $PYTHON_EXEC; empty counts as unset
  std::optional<std::string> path;         // $PATH
};

// Returns the argv of a worker, with `${local_rank}` still in it: the agent replaces it. A Python
// module or script runs under $PYTHON_EXEC, else python3, with -u; any other program is executed
// itself. A script is a program of kPythonScript, or one of kByName whose name ends in `.py`.
// argv[0] is the path of an existing executable file, so a mistake is found before any process is
// started.
//
// Reads file metadata, changes nothing. Thread: any. Errors, one line each that names the file:
// - kNotFound: no such program, script or interpreter.
// - kPermissionDenied: the file cannot be executed, or the script cannot be read.
absl::StatusOr<std::vector<std::string>> WorkerCommand(const ProgramRequest& request);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_WORKER_COMMAND_H_
