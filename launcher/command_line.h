#ifndef DDP_LAUNCHER_COMMAND_LINE_H_
#define DDP_LAUNCHER_COMMAND_LINE_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/flag_table.h"

// What ddprun understands on its command line and in PET_* variables.
//
// The table of flags (launcher/flag_table.h) decides where ddprun's own end and the program begins.
// Only what stands before the program goes on to gflags, as `--name=value` under the name
// that gflags knows: gflags alone would read on through the program's own arguments, exit with 1
// on a flag that it does not know, and take `--log-dir` and `-v` for glog's.
//
// Pure functions of their arguments; any thread.
namespace ddp::launcher {

// Tells the value of an environment variable; nothing when it is unset.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

// A command line taken apart.
struct CommandLine {
  bool help = false;     // --help was asked for; nothing else was looked at
  bool version = false;  // the same for --version

  // The shell that --print-completion named; empty: it was not given.
  std::string completion;

  // For gflags, `--name=value` each: first what the environment sets, then the command line, so
  // that the last one counts.
  std::vector<std::string> gflags;

  // Gflags name -> what the user wrote to set it last: "--nproc_per_node", "-t", "PET_NNODES".
  std::map<std::string, std::string> spelled;

  // The program and its own arguments, untouched. Never empty unless `help`, `version` or
  // `completion` is set.
  std::vector<std::string> program;
};

// Takes `arguments` (without argv[0]) apart. A flag may be written with `-` or `_`, its value as
// `--flag value` or `--flag=value` (-t 3, -t=3 and -t3 for short ones); abbreviations are refused.
// A `--` before the program is skipped, and so is the need to look like one.
//
// Errors: kInvalidArgument (unknown flag, missing or unwanted value, no program, a switch's PET_*
// variable that is neither 0 nor 1), one line that names the flag and what is allowed.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const EnvironmentLookup& environment);

// "PET_NPROC_PER_NODE": the variable that sets `flag` where the command line does not; empty where
// there is none.
std::string VariableOf(const FlagSpec& flag);

// The text of --help, from the table.
std::string HelpText();

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_COMMAND_LINE_H_
