#ifndef DDP_LAUNCHER_FLAGS_LAUNCH_OPTIONS_H_
#define DDP_LAUNCHER_FLAGS_LAUNCH_OPTIONS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launcher/flags/exit_code.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/host_resources.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/output/output_options.h"
#include "launcher/process/numa_plan.h"

namespace ddp::launcher {

// Way in which the program is started.
enum class ProgramKind { kByName, kPythonModule, kPythonScript, kExecutable };

// Rendezvous of the nodes: its place and its times. A timeout is the longest wait.
struct RendezvousOptions {
  RendezvousKind kind = RendezvousKind::kPrivate;
  std::string endpoint;  // kRedis only: the user's text
  int default_port = 0;  // kRedis only: port of an endpoint that names none
  std::string run_id;    // run id of the user; empty: none given
  absl::Duration join_timeout = absl::Minutes(10);
  absl::Duration last_call = absl::Seconds(30);
  absl::Duration lease = absl::Seconds(3);
  absl::Duration heartbeat = absl::Milliseconds(500);
  absl::Duration heartbeat_timeout;                 // answer to a heartbeat; at most the lease
  absl::Duration read_timeout;                      // store at the start; zero: join_timeout
  absl::Duration close_timeout = absl::Seconds(2);  // last requests of a leaving node
  absl::Duration store_outage_timeout = absl::Minutes(10);
  // Returns the longest wait at the start for the rendezvous: first for its name, then for its
  // server.
  absl::Duration ReachTimeout() const {
    return read_timeout > absl::ZeroDuration() ? read_timeout : join_timeout;
  }

  std::optional<bool> is_host;  // true: this node serves the endpoint; unset: the node that can
};

// Flags of ddprun, parsed and checked.
struct LaunchOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  int nproc_per_node = 1;
  std::string role;
  int node_rank = -1;       // rank of this node; -1: any
  std::string master_addr;  // MASTER_ADDR; empty: the node of rank 0 (kRedis)
  int master_port = 0;      // 0: any free one
  std::string local_addr;   // address of this node; empty: found from the kernel

  ProgramKind program_kind = ProgramKind::kByName;
  bool virtual_local_rank = false;
  NumaBinding numa_binding = NumaBinding::kNone;

  RendezvousOptions rendezvous;

  int max_restarts = 0;
  int no_progress_limit = 3;   // 0: none
  int quarantine_strikes = 3;  // 0: none
  absl::Duration hang_floor;   // 0: workers never hang
  absl::Duration fault_grace;
  absl::Duration shutdown_timeout;
  absl::Duration kill_timeout;  // longest wait for the kernel after SIGKILL
  absl::Duration exit_barrier_timeout;
  std::vector<int> signals_to_handle;
  ExitCodeStyle exit_code = ExitCodeStyle::kDefault;

  double straggler_factor = 0;      // 0: no report
  std::optional<int> metrics_port;  // 0: any free one
  std::string event_log_file;
  bool events_to_console = false;

  OutputOptions output;

  // Lines that ddprun prints once before the job starts. They name values that were accepted for
  // torchrun's sake and have another meaning here, or none.
  std::vector<std::string> notices;
};

// Checks `values` and turns them into options. `spelled` is CommandLine::spelled: the user's
// spelling of each flag, for messages. Pure. Thread: any.
//
// Errors: kInvalidArgument, one line that names the flag, its value and the allowed values.
absl::StatusOr<LaunchOptions> ParseLaunchOptions(const FlagValues& values,
                                                 const std::map<std::string, std::string>& spelled,
                                                 const HostResources& host);

// Parses 0, 1, 2 or 3, or a list of LOCAL_RANK:STREAMS pairs such as "0:1,11:3". Errors:
// kInvalidArgument; the message names the fault, not the flag.
absl::StatusOr<StreamMap> ParseStreamMap(const std::string& text);

// Splits `text` at commas; `,,` stands for a comma within a text. Empty texts are left out.
std::vector<std::string> SplitFilters(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_LAUNCH_OPTIONS_H_
