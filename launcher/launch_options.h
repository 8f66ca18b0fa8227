#ifndef DDP_LAUNCHER_LAUNCH_OPTIONS_H_
#define DDP_LAUNCHER_LAUNCH_OPTIONS_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launcher/exit_code.h"
#include "launcher/flag_reader.h"
#include "launcher/host_resources.h"
#include "launcher/numa_plan.h"
#include "launcher/rendezvous_choice.h"

namespace ddp::launcher {

// Which of a worker's two output streams is meant. Bits, as in the value of -r and -t.
enum Streams : int { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

// Streams by local rank: what -r and -t say.
struct StreamMap {
  int all = kNoStream;  // for ranks that `by_local_rank` does not name
  std::map<int, int> by_local_rank;

  int Get(int local_rank) const;
  bool Contains(Streams stream) const;  // this one, or a part of it, of any rank
  bool empty() const { return !Contains(kBothStreams); }
};

// How the program is started.
enum class ProgramKind { kByName, kPythonModule, kPythonScript, kExecutable };

// Where and how nodes meet.
struct RendezvousOptions {
  RendezvousKind kind = RendezvousKind::kPrivate;
  std::string endpoint;  // kRedis: as the user gave it
  int default_port = 0;  // kRedis: of an endpoint that names none
  std::string run_id;    // empty: the user gave none
  absl::Duration join_timeout = absl::Minutes(10);
  absl::Duration last_call = absl::Seconds(30);
  absl::Duration lease = absl::Seconds(3);
  absl::Duration heartbeat = absl::Milliseconds(500);
  absl::Duration heartbeat_timeout;  // for the answer to one; never longer than the lease
  absl::Duration read_timeout;       // for the store to be reached at the start; zero: join_timeout
  absl::Duration close_timeout = absl::Seconds(2);  // for the last requests of a node that leaves
  absl::Duration store_outage_timeout = absl::Minutes(10);
  // How long the place where nodes meet is waited for at the start: its name, then its server.
  absl::Duration ReachTimeout() const {
    return read_timeout > absl::ZeroDuration() ? read_timeout : join_timeout;
  }

  std::optional<bool> is_host;  // whether this node serves the endpoint; unset: whoever can
};

// What becomes of the workers' output.
struct OutputOptions {
  std::string log_dir;  // empty: a temporary one
  StreamMap redirects;
  StreamMap tee;
  std::set<int> local_ranks_filter;            // that reach the console; empty: all
  std::vector<std::string> filters_of_stdout;  // texts; a teed line with one is duplicated
  std::vector<std::string> filters_of_stderr;
  std::string prefix_template;
};

// The flags of ddprun, parsed and checked.
struct LaunchOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  int nproc_per_node = 1;
  std::string role;
  int node_rank = -1;       // -1: any
  std::string master_addr;  // empty: wherever rank 0 is (kRedis)
  int master_port = 0;      // 0: any free one
  std::string local_addr;   // empty: to be found

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
  absl::Duration kill_timeout;  // for the kernel, after SIGKILL
  absl::Duration exit_barrier_timeout;
  std::vector<int> signals_to_handle;
  ExitCodeStyle exit_code = ExitCodeStyle::kDefault;

  double straggler_factor = 0;      // 0: no report
  std::optional<int> metrics_port;  // 0: any free one
  std::string event_log_file;
  bool events_to_console = false;

  OutputOptions output;

  // What the user should hear once before the job starts, one line each: values that were accepted
  // for torchrun's sake and mean something else here, or nothing.
  std::vector<std::string> notices;
};

// Checks `values` and turns them into options. `spelled` is CommandLine::spelled: how the user
// wrote each flag, for messages. Pure; any thread.
//
// Errors: kInvalidArgument, one line that names the flag, its value and what is allowed.
absl::StatusOr<LaunchOptions> ParseLaunchOptions(const FlagValues& values,
                                                 const std::map<std::string, std::string>& spelled,
                                                 const HostResources& host);

// `text` is 0, 1, 2 or 3, or a list of LOCAL_RANK:STREAMS pairs such as "0:1,11:3".
// Errors: kInvalidArgument (says what is wrong with it, not which flag it belongs to).
absl::StatusOr<StreamMap> ParseStreamMap(const std::string& text);

// Texts with commas between; `,,` stands for a comma in a text. Empty texts are left out.
std::vector<std::string> SplitFilters(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LAUNCH_OPTIONS_H_
