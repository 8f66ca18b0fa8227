#ifndef DDP_LAUNCHER_STATUS_COMMAND_H_
#define DDP_LAUNCHER_STATUS_COMMAND_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// `ddprun status`: shows a job, read from its store, to a person or as JSON.
//
// In main(), before anything else is made of the arguments:
//
//   if (IsStatusCommand(arguments, &ProgramExists)) return RunStatusCommand(arguments);
//
// It is this command only when `status` is the first word and no program of that name would be run:
// neither a file in the current folder nor one on PATH. `ddprun -- status` is always the program.

// `arguments`: those of main() without argv[0]. `program_exists` is asked for the word at most.
bool IsStatusCommand(const std::vector<std::string>& arguments,
                     const std::function<bool(const std::string&)>& program_exists);

// What to add to the message that a program cannot be run, where the user may have meant this
// command: a file that is named so, and cannot be run, hides it. Else empty.
std::string HiddenStatusCommandHint(const std::vector<std::string>& arguments);

// Whether `name` is a file in the current folder or an executable on PATH.
bool ProgramExists(const std::string& name);

// What was asked for.
struct StatusRequest {
  bool help = false;
  bool json = false;
  bool all = false;                     // every node and rank, however many
  std::optional<std::string> endpoint;  // none: the jobs of this user on this host
  std::optional<std::string> run_id;  // none: with an endpoint, the one that ddprun has by default
  int64_t instance = 0;               // of the run id; 0: the newest, one that runs before others
};

// Reads the arguments behind `status`; --rdzv-endpoint and --rdzv-id may come from PET_RDZV_* too.
// Pure. Errors: kInvalidArgument, one line that names the flag and what is allowed.
absl::StatusOr<StatusRequest> ParseStatusArguments(
    const std::vector<std::string>& arguments,
    const std::function<std::optional<std::string>(const std::string&)>& environment);

// Prints the report on stdout; what went wrong on stderr, a line each. Returns the exit code: 0 a
// job was shown, 1 none was found or none could be read, 2 a mistake on the command line.
// `arguments` begin with `status`.
int RunStatusCommand(const std::vector<std::string>& arguments);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_STATUS_COMMAND_H_
