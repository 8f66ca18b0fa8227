#ifndef DDP_LAUNCHER_FLAGS_LAUNCH_OPTIONS_H_
#define DDP_LAUNCHER_FLAGS_LAUNCH_OPTIONS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/agent/launch_config.h"
#include "launcher/flags/exit_code.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/host_resources.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/output/output_options.h"
#include "launcher/process/numa_plan.h"

namespace ddp::launcher {

// Way in which the program is started.
enum class ProgramKind { kByName, kPythonModule, kPythonScript, kExecutable };

// RendezvousOptions tell where the nodes meet, and how this node comes there.
struct RendezvousOptions {
  RendezvousKind kind = RendezvousKind::kPrivate;
  std::string endpoint;              // kRedis only: the user's text
  int default_port = 0;              // kRedis only: port of an endpoint that names none
  absl::Duration heartbeat_timeout;  // longest wait for an answer to a heartbeat; at most the lease
  absl::Duration read_timeout;       // longest wait for the rendezvous server at the start
  absl::Duration retry_pause_max;    // longest pause before a failed request is sent again
  bool any_program = false;          // nodes of one run id may run different programs
  // Files of a rediss:// endpoint: names and values, see store::SetTlsFile().
  std::vector<std::pair<std::string, std::string>> tls_files;
  std::optional<bool> is_host;  // false: this node starts no server at the endpoint; unset: true
};

// LaunchOptions hold the flags of ddprun, parsed and checked.
struct LaunchOptions {
  // The job. `run_id` is the user's; empty: none given.
  elastic::JobSpec job;

  // This node's part in the job, as in LaunchConfig.
  int nproc_per_node = elastic::LaunchConfig::kDefaultNprocPerNode;
  int node_rank = -1;
  std::string master_addr = "127.0.0.1";  // empty (kRedis only): this node's address is to be found
  int master_port = 0;
  bool virtual_local_rank = false;
  std::vector<int> signals_to_handle{elastic::LaunchConfig::kDefaultSignals.begin(),
                                     elastic::LaunchConfig::kDefaultSignals.end()};

  std::string local_addr;  // address of this node; empty: found from the kernel
  RendezvousOptions rendezvous;

  ProgramKind program_kind = ProgramKind::kByName;
  NumaBinding numa_binding = NumaBinding::kNone;
  ExitCodeStyle exit_code = ExitCodeStyle::kDefault;

  std::optional<int> metrics_port;  // 0: any free one
  std::string event_log_file;
  bool events_to_console = false;

  OutputOptions output;

  // Lines that ddprun prints once before the job starts. They name values that were accepted for
  // torchrun's sake and have another meaning here, or none.
  std::vector<std::string> notices;
};

// Checks the flags and turns them into options. Pure. Thread: any.
//
// Errors: kInvalidArgument, one line that names the flag, its value and the allowed values, or two
// flags that contradict each other.
absl::StatusOr<LaunchOptions> ParseLaunchOptions(const FlagReader& flags,
                                                 const HostResources& host);

// Parses 0, 1, 2 or 3, or a list of LOCAL_RANK:STREAMS pairs such as "0:1,11:3". Errors:
// kInvalidArgument; the message names the fault, not the flag.
absl::StatusOr<StreamMap> ParseStreamMap(const std::string& text);

// Splits `text` at commas; `,,` stands for a comma within a text. Empty texts are left out.
std::vector<std::string> SplitFilters(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_LAUNCH_OPTIONS_H_
