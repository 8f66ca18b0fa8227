#ifndef DDP_LAUNCHER_FLAGS_COMMAND_LINE_H_
#define DDP_LAUNCHER_FLAGS_COMMAND_LINE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/environment.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/flag_table.h"

// Parser of ddprun's command line and of the PET_* variables.
//
// The table of flags (launcher/flags/flag_table.h) decides where ddprun's own flags end and the
// program begins. (gflags would read the program's own arguments too.)
//
// Pure functions of their arguments. Thread: any.
namespace ddp::launcher {

// A parsed command line.
struct CommandLine {
  bool help = false;     // --help was given; parsing stopped there
  bool version = false;  // --version was given; parsing stopped there

  // Shell that --print-completion named; empty when the flag was not given.
  std::string completion;

  // The flags that the command line sets, and those that only a variable sets. The last setting on
  // the command line counts.
  GivenFlags flags;

  // Program and its own arguments, untouched. Never empty unless `help`, `version` or `completion`
  // is set.
  std::vector<std::string> program;
};

// Parses `arguments` (without argv[0]).
//
// - The words of a flag may be joined by `-` or `_`. Its value follows as `--flag value` or
//   `--flag=value`; for short flags as -t 3, -t=3 or -t3.
// - Abbreviations are refused.
// - A `--` before the program is skipped. The program then follows even if it begins with `-`.
//
// Errors: kInvalidArgument, one line that says what is wrong and what is expected. Causes: an
// unknown flag, a missing or unwanted value, an unknown shell for --print-completion, no program, a
// switch's PET_* variable that is neither 0 nor 1.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const VariableGetter& environment);

// Returns the variable that sets `flag` where the command line does not, such as
// "PET_NPROC_PER_NODE"; empty when the flag has none.
std::string VariableOf(const FlagSpec& flag);

// Returns the text of --help, made from the table of flags.
std::string HelpText();

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_COMMAND_LINE_H_
