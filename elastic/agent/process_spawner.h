#ifndef DDP_ELASTIC_AGENT_PROCESS_SPAWNER_H_
#define DDP_ELASTIC_AGENT_PROCESS_SPAWNER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// A worker process to start.
struct WorkerSpec {
  int local_rank = 0;
  int rank = 0;
  int attempt = 0;                                 // restart count; names the log folder
  uint64_t generation = 0;                         // distinguishes the folders of one attempt
  std::string role;                                // for the prefix of teed lines
  std::vector<std::string> argv;                   // argv[0] is a path; PATH is not searched
  std::map<std::string, std::string> environment;  // overrides what the agent inherited
  std::vector<int> inherited_fds;                  // stay open in the worker under the same numbers
};

// The exit of a process.
struct ExitStatus {
  int exit_code = 0;            // meaningful when signal == 0
  int signal = 0;               // the signal that killed it, or 0
  std::string error_file = {};  // error file given to the worker; may not exist
  std::string cause = {};       // why, where the agent knows: "out of memory: ..."
  bool succeeded() const { return exit_code == 0 && signal == 0; }
};

// Starts and kills the worker processes of one node.
//
// Each worker leads its own process group and session, and dies when its parent dies. Signal()
// reaches the process group only; KillStrays() also reaches descendants that left the group.
//
// Thread: that of the EventLoop it was made with; callbacks run there.
class ProcessSpawner {
 public:
  virtual ~ProcessSpawner() = default;

  // Called once per start: with the pid after exec has succeeded or the process has ended before
  // it; with an error when there is no process. Errors: kNotFound (no such program),
  // kPermissionDenied (not executable), kResourceExhausted (fork, pipe), kUnimplemented (the
  // system refuses a call), kInternal (log files), kCancelled (this process is being killed).
  using StartCallback = std::function<void(absl::StatusOr<pid_t> pid)>;

  // Called once per started worker, after its StartCallback. By then the worker has been reaped and
  // its pipes have been drained.
  using ExitCallback = std::function<void(pid_t pid, ExitStatus status)>;

  // Starts a worker. Does not wait for its log files or for exec, which may be on a stalled mount.
  // Adds TORCHELASTIC_ERROR_FILE to the environment. One start at a time: call again after
  // `on_start`, which may be called before Spawn() returns. Cancels KillStrays().
  virtual void Spawn(const WorkerSpec& spec, StartCallback on_start, ExitCallback on_exit) = 0;

  // Cancels the start that is in progress, if any, and kills its process. Neither of its callbacks
  // is called.
  virtual void CancelStart() = 0;

  // Sends `signal` to the process group of `pid`; ESRCH is no error.
  virtual void Signal(pid_t pid, int signal) = 0;

  // Kills (SIGKILL) every descendant of this process that is not a worker started by Spawn() in the
  // running generation. Returns at once. Calls `on_gone` when none is left, possibly before
  // KillStrays() returns. A later KillStrays() or Spawn() replaces this call: `on_gone` is then not
  // called. Call between generations and at the end.
  virtual void KillStrays(std::function<void()> on_gone) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_PROCESS_SPAWNER_H_
