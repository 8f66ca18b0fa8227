#ifndef DDP_LAUNCHER_PROCESS_KEEPER_H_
#define DDP_LAUNCHER_PROCESS_KEEPER_H_

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "elastic/job/job_spec.h"

namespace ddp::launcher {

// Options of RunWithKeeper(), which runs the agent in a child process. When one of these two
// processes is killed, even by SIGKILL, the other removes everything: processes, sockets, folders.
//
//   keeper   the process that the user started; forwards signals, returns the agent's exit code
//     `- agent   runs the job; every worker and the private Redis server are below it
//
// Both are child subreapers.
// - The agent dies: all its descendants, also those in sessions of their own, become the keeper's
//   children. The keeper kills them until none is left. For the processes that the agent's main
//   thread started, the kernel is faster: it kills them when that thread ends (PDEATHSIG).
// - The keeper dies: a thread of the agent, the watcher, kills everything below the agent, then
//   ends the agent. Before that end it waits at most half a second for the agent's last message
//   to the other nodes. It waits for no other work of the agent.
//
// In both cases the survivor also removes the two folders below. It keeps the folder of logs when
// that folder holds the workers' output, and prints a line that names it.
//
// While the agent lives, the keeper reaps its other children when they end; as the first process of
// a container, all orphans. The agent has a session of its own and the process name "ddp-agent":
// neither a signal to the terminal's process group nor a kill by name reaches both.
//
// Ctrl-Z (SIGTSTP): the keeper stops itself once it has told the agent, which then stops the
// workers and stays alive. When the keeper continues, it sends SIGCONT to the agent.
//
// Known weakness: if the survivor is killed before it has finished, the rest stays.
struct KeeperOptions {
  // Folder that is removed at the end in any case.
  std::string runtime_folder;

  // Folder of logs that is removed when the keeper or the agent was killed; otherwise the agent
  // decides. Empty: none.
  std::string temporary_log_folder;

  // True when the workers' output goes to that folder. A folder with a file that is not empty is
  // then kept.
  bool logs_hold_output = false;

  // Signals that are forwarded to the agent, as HoldSignals() blocked them.
  std::vector<int> signals;

  // Maximum wait of the survivor for the processes that it has killed. Only a process that is stuck
  // in the kernel needs more than a few milliseconds.
  absl::Duration kill_timeout = elastic::AgentTimes{}.kill_timeout;

  int cannot_start_exit_code = 1;  // when no thread can be started
  int stopped_exit_code = 1;       // when a forwarded signal killed the agent

  // Title of the agent in the process table, written over the arguments of main(). Without `argv`
  // only the short name is set.
  std::string agent_title;
  int argc = 0;
  char** argv = nullptr;
};

// Shared state of the agent and its watcher, as the agent sees it. Lives as long as the process.
struct AgentContext {
  // True once the keeper is dead and the watcher kills everything: start no process any more.
  const std::atomic<bool>* doomed = nullptr;

  // Descriptor that is readable once the keeper is dead.
  int keeper_fd = -1;

  // Set by the agent while it has a last message for the other nodes. The watcher, having killed
  // everything, then waits until 8 bytes are written to `said_fd`, an eventfd; at most half a
  // second.
  std::atomic<bool>* has_last_word = nullptr;
  int said_fd = -1;
};

// Blocks `signals` in the calling thread until RunWithKeeper() forwards them; not SIGHUP where
// nohup had it ignored. Call it before making the folders: from then on a signal ends the job in
// order.
void HoldSignals(const std::vector<int>& signals);

// Unblocks `signals` while the agent prepares the job: a forwarded signal then ends the agent at
// once, and the keeper cleans up. Call HoldSignals() again before anything that must end in order.
void ReleaseSignals(const std::vector<int>& signals);

// Returns a descriptor that is readable once one of the blocked `signals` is pending, for use in
// other waits. Invalid when no descriptor is left.
UniqueFd WatchHeldSignals(const std::vector<int>& signals);

// Forks. The child calls `agent` and exits with its result. The parent blocks until the agent has
// ended, cleans up and returns that exit code. If signal N killed the agent, the parent prints a
// line on stderr. It then returns `stopped_exit_code` if N was forwarded to the agent, else 128 +
// N.
//
// Thread: main, in a process without other threads, after HoldSignals(). Children that the process
// already has are reaped, but not killed.
//
// Errors; no agent is left running then:
// - kResourceExhausted: no process or descriptor could be had.
// - kUnimplemented: pidfd_open failed for the keeper itself; a kernel older than 5.3 lacks it.
absl::StatusOr<int> RunWithKeeper(const KeeperOptions& options,
                                  const std::function<int(const AgentContext&)>& agent);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_KEEPER_H_
