#ifndef DDP_LAUNCHER_LAUNCH_OPTIONS_H_
#define DDP_LAUNCHER_LAUNCH_OPTIONS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launcher/host_resources.h"

namespace ddp::launcher {

// The flags of ddprun as text, the way gflags hands them over.
struct FlagValues {
  std::string nnodes;
  std::string nproc_per_node;
  std::string role;
  std::string master_addr;
  std::string master_port;
  bool module = false;
  bool no_python = false;
  bool run_path = false;
  bool standalone = false;
  std::string rdzv_backend;
  std::string rdzv_endpoint;
  std::string rdzv_id;
  std::string lease_ms;
  std::string max_restarts;
  std::string fault_grace_ms;
  std::string shutdown_timeout;
  std::string worker_log_dir;
  std::string redirects;
  std::string tee;
  std::string event_log_file;
};

// Which of a worker's two output streams is meant. Bits, as in the value of -r and -t.
enum Streams : int { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

// Streams by local rank: what -r and -t say.
struct StreamMap {
  int all = kNoStream;  // for ranks that `by_local_rank` does not name
  std::map<int, int> by_local_rank;

  int Get(int local_rank) const;
  bool empty() const;  // no stream of any rank
};

// How the program is started.
enum class ProgramKind { kByName, kPythonModule, kPythonScript, kExecutable };

// The flags of ddprun, parsed and checked.
struct LaunchOptions {
  int nproc_per_node = 1;
  std::string role;
  std::string master_addr;
  int master_port = 0;  // 0: any free one
  ProgramKind program_kind = ProgramKind::kByName;
  std::string rdzv_endpoint;  // empty: a private Redis server
  std::string run_id;         // empty: the user gave none
  absl::Duration lease;
  int max_restarts = 0;
  absl::Duration fault_grace;
  absl::Duration shutdown_timeout;
  std::string log_dir;  // empty: a temporary one
  StreamMap redirects;
  StreamMap tee;
  std::string event_log_file;
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

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LAUNCH_OPTIONS_H_
