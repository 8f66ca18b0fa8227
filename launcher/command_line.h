#ifndef DDP_LAUNCHER_COMMAND_LINE_H_
#define DDP_LAUNCHER_COMMAND_LINE_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

// What ddprun understands on its command line and in PET_* variables.
//
// One table says everything about a flag; it decides where ddprun's own flags end and the program
// begins. Only what stands before the program goes on to gflags, as `--name=value` under the name
// that gflags knows: gflags alone would read on through the program's own arguments, exit with 1
// on a flag that it does not know, and take `--log-dir` and `-v` for glog's.
//
// Pure functions of their arguments; any thread.
namespace ddp::launcher {

enum class HelpGroup { kJob, kProgram, kRendezvous, kFailures, kLogs, kOther };

// One flag of ddprun. Texts live as long as the program.
struct FlagSpec {
  const char* name;         // as the help shows it: "nproc-per-node"; `_` is as good as `-`
  char short_name;          // 'm' for -m; 0: none
  bool takes_value;         // false: a switch
  const char* environment;  // sets it where the command line does not; nullptr: nothing does
  const char* gflag;        // its name in gflags; nullptr: answered by the parser itself
  HelpGroup group;
  const char* default_value;  // "" for switches and for flags without one
  const char* value_name;     // "N|cpu|gpu|auto"; "" for switches
  const char* help;
};

// In the order of the help text.
inline constexpr FlagSpec kFlagTable[] = {
    {"nnodes", 0, true, "PET_NNODES", "nnodes", HelpGroup::kJob, "1:1", "N|MIN:MAX",
     "Nodes of the job. This version runs one node: 1 or 1:1."},
    {"nproc-per-node", 0, true, "PET_NPROC_PER_NODE", "nproc_per_node", HelpGroup::kJob, "1",
     "N|cpu|gpu|auto",
     "Workers on this node: a number, one per CPU, one per GPU, or auto: GPUs where there are any,"
     " else CPUs."},
    {"role", 0, true, "PET_ROLE", "role", HelpGroup::kJob, "default", "NAME",
     "ROLE_NAME of the workers and the start of their log prefix."},
    {"master-addr", 0, true, "PET_MASTER_ADDR", "master_addr", HelpGroup::kJob, "127.0.0.1",
     "ADDRESS", "MASTER_ADDR of the workers."},
    {"master-port", 0, true, "PET_MASTER_PORT", "master_port", HelpGroup::kJob, "0", "PORT",
     "MASTER_PORT of the workers; 0: one that is free, found anew for each generation."},
    {"module", 'm', false, "PET_MODULE", "module", HelpGroup::kProgram, "", "",
     "PROGRAM is the name of a Python module, run as by python -m."},
    {"no-python", 0, false, "PET_NO_PYTHON", "no_python", HelpGroup::kProgram, "", "",
     "Execute PROGRAM itself, also when its name ends in .py."},
    {"run-path", 0, false, "PET_RUN_PATH", "run_path", HelpGroup::kProgram, "", "",
     "PROGRAM is a Python script, whatever its name ends in."},
    {"standalone", 0, false, "PET_STANDALONE", "standalone", HelpGroup::kRendezvous, "", "",
     "Use a private Redis server that lives as long as the job; --rdzv-endpoint is ignored. The"
     " same happens with one node and no endpoint."},
    {"rdzv-backend", 0, true, "PET_RDZV_BACKEND", "rdzv_backend", HelpGroup::kRendezvous, "redis",
     "NAME", "Where the nodes meet: redis."},
    {"rdzv-endpoint", 0, true, "PET_RDZV_ENDPOINT", "rdzv_endpoint", HelpGroup::kRendezvous, "",
     "HOST[:PORT]|URL",
     "The Redis server: HOST, HOST:PORT (6379), [IPv6]:PORT, redis://HOST[:PORT][/DATABASE] or"
     " unix:///PATH. User and password come from DDP_REDIS_USER, DDP_REDIS_PASSWORD or"
     " DDP_REDIS_PASSWORD_FILE."},
    {"rdzv-id", 0, true, "PET_RDZV_ID", "rdzv_id", HelpGroup::kRendezvous, "", "ID",
     "Name of the job; random when not given."},
    {"lease-ms", 0, true, "PET_LEASE_MS", "lease_ms", HelpGroup::kRendezvous, "3000", "MS",
     "A node that Redis has not heard of for so long is taken for dead."},
    {"max-restarts", 0, true, "PET_MAX_RESTARTS", "max_restarts", HelpGroup::kFailures, "0", "N",
     "Failures after which all workers are started again; one more ends the job."},
    {"fault-grace-ms", 0, true, "PET_FAULT_GRACE_MS", "fault_grace_ms", HelpGroup::kFailures, "200",
     "MS", "After a failure: time from SIGTERM to SIGKILL for the other workers."},
    {"shutdown-timeout", 0, true, "PET_SHUTDOWN_TIMEOUT", "shutdown_timeout", HelpGroup::kFailures,
     "30", "SECONDS",
     "After SIGTERM, SIGINT, SIGHUP or SIGQUIT to ddprun, which the workers get too: time until"
     " SIGKILL. A second SIGTERM or SIGINT kills at once."},
    {"log-dir", 0, true, "PET_LOG_DIR", "worker_log_dir", HelpGroup::kLogs, "", "FOLDER",
     "Workers' files go to FOLDER/<id>_<random>/attempt_<n>/<local rank>/{stdout,stderr}.log and"
     " error.json. Without it: a temporary folder, which does not outlive a job that succeeded and"
     " had neither -r nor -t, nor the SIGKILL of ddprun. /dev/null: no files."},
    {"redirects", 'r', true, "PET_REDIRECTS", "redirects", HelpGroup::kLogs, "0", "WHAT",
     "Send workers' output to their files only: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local"
     " rank: 0:1,1:3."},
    {"tee", 't', true, "PET_TEE", "tee", HelpGroup::kLogs, "0", "WHAT",
     "Send workers' output to their files and to the console, there with a prefix like"
     " [default0]:. WHAT as for -r."},
    {"event-log-file", 0, true, "PET_EVENT_LOG_FILE", "event_log_file", HelpGroup::kLogs, "",
     "FILE", "Append what happens to the job to FILE, as JSON lines."},
    {"help", 'h', false, nullptr, nullptr, HelpGroup::kOther, "", "", "Show this text."},
    {"version", 0, false, nullptr, nullptr, HelpGroup::kOther, "", "", "Show the version."},
};

// The default of the flag that gflags calls `gflag`: so that it stands in the table only. Does not
// compile for a name that the table lacks.
consteval const char* DefaultOf(const char* gflag) {
  for (const FlagSpec& flag : kFlagTable) {
    if (flag.gflag == nullptr) continue;
    const char* a = flag.gflag;
    const char* b = gflag;
    while (*a != '\0' && *a == *b) ++a, ++b;
    if (*a == *b) return flag.default_value;
  }
  throw "no such flag";  // not a constant expression: the compiler shows this line
}

// Tells the value of an environment variable; nothing when it is unset.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

// A command line taken apart.
struct CommandLine {
  bool help = false;     // --help was asked for; nothing else was looked at
  bool version = false;  // the same for --version

  // For gflags, `--name=value` each: first what the environment sets, then the command line, so
  // that the last one counts.
  std::vector<std::string> gflags;

  // Gflags name -> what the user wrote to set it last: "--nproc_per_node", "-t", "PET_NNODES".
  std::map<std::string, std::string> spelled;

  // The program and its own arguments, untouched. Never empty unless `help` or `version`.
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

// The text of --help, from the table.
std::string HelpText();

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_COMMAND_LINE_H_
