#ifndef DDP_LAUNCHER_SUBCOMMANDS_SUBCOMMAND_H_
#define DDP_LAUNCHER_SUBCOMMANDS_SUBCOMMAND_H_

#include <functional>
#include <string>
#include <vector>

namespace ddp::launcher {

// Subcommands of ddprun: `ddprun status` and `ddprun checkpoint`.
//
// In main(), before the arguments are used otherwise:
//
//   if (IsSubcommand("status", arguments, &ProgramExists)) return RunStatusCommand(arguments);
//
// The word is a subcommand only as the first argument, and only if no program of that name would be
// run: neither a file in the current folder nor one on PATH. `ddprun -- status` is always the
// program.

// Returns true when `arguments`, those of main() without argv[0], are the subcommand `name`.
// `program_exists` is called at most for `name`.
bool IsSubcommand(const std::string& name, const std::vector<std::string>& arguments,
                  const std::function<bool(const std::string&)>& program_exists);

// Returns a hint for the message that a program cannot be run, where the user may have meant a
// subcommand: a file of its name that cannot be run hides it. Empty otherwise.
std::string HiddenSubcommandHint(const std::vector<std::string>& arguments);

// Returns true when `name` is a file in the current folder or an executable on PATH.
bool ProgramExists(const std::string& name);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SUBCOMMANDS_SUBCOMMAND_H_
