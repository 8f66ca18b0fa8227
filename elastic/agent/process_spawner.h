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

// One worker process to start.
struct WorkerSpec {
  int local_rank = 0;
  int rank = 0;
  int attempt = 0;                                 // restart count: names the log folder
  uint64_t generation = 0;                         // tells the folders of one attempt apart
  std::string role;                                // for the prefix of teed lines
  std::vector<std::string> argv;                   // argv[0] is looked up on PATH as execvp does
  std::map<std::string, std::string> environment;  // over what the agent itself inherited
  std::vector<int> inherited_fds;                  // stay open in the worker under the same number
};

// How a process ended.
struct ExitStatus {
  int exit_code = 0;            // meaningful when signal == 0
  int signal = 0;               // the signal that killed it, or 0
  std::string error_file = {};  // where the worker was told to describe its failure; may not exist
  bool succeeded() const { return exit_code == 0 && signal == 0; }
};

// Starts and kills the worker processes of one node.
//
// Each worker is the leader of its own process group and session, dies when its parent does, and
// is never outlived by a descendant: KillTree reaches descendants that left the group as well.
// On the thread of the EventLoop that it was made with; `on_exit` is called there.
class ProcessSpawner {
 public:
  virtual ~ProcessSpawner() = default;

  // Called once per start: with the pid when exec has succeeded, or the process has ended before;
  // with an error when there is no process. Errors: kNotFound (no such program), kPermissionDenied
  // (not executable), kResourceExhausted (fork, pipe), kInternal (log files), kCancelled (this
  // process is being killed).
  using StartCallback = std::function<void(absl::StatusOr<pid_t> pid)>;

  // Called once per worker that was started, after its StartCallback, when it was reaped and its
  // last output was taken from its pipes.
  using ExitCallback = std::function<void(pid_t pid, ExitStatus status)>;

  // Starts a worker, without waiting for its log files or for exec, which both may be on a mount
  // that has stalled. Adds TORCHELASTIC_ERROR_FILE to the environment. One start at a time: the
  // next one after `on_start`, which may be called before Spawn() returns. Ends KillStrays().
  virtual void Spawn(const WorkerSpec& spec, StartCallback on_start, ExitCallback on_exit) = 0;

  // Gives up the start that is under way, if one is: kills its process. Neither of its callbacks is
  // called any more.
  virtual void CancelStart() = 0;

  // Sends `signal` to the process group of `pid`; ESRCH is no error.
  virtual void Signal(pid_t pid, int signal) = 0;

  // SIGKILLs every descendant of this process that no Spawn() of the running generation accounts
  // for: what workers left behind. Returns at once; calls `on_gone` when none is left, maybe before
  // KillStrays() returns. A later KillStrays() or Spawn() takes its place: then `on_gone` is not
  // called any more. Called between generations and at the end.
  virtual void KillStrays(std::function<void()> on_gone) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_PROCESS_SPAWNER_H_
