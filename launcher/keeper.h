#ifndef DDP_LAUNCHER_KEEPER_H_
#define DDP_LAUNCHER_KEEPER_H_

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::launcher {

// Runs the agent in a child process, so that whichever of the two is killed, by SIGKILL too, the
// other one leaves nothing behind: no process, no socket, no folder.
//
//   keeper   the process that the user started. Forwards signals to the agent, returns its exit
//   code.
//     `- agent   does the work; every worker and the private Redis server are below it.
//
// Both are child subreapers. When the agent dies, all its descendants, those in sessions of their
// own included, become the keeper's, which kills them until none is left. While the agent lives the
// keeper reaps what else ends below it: children that its process had before, what these leave
// behind, and every orphan of a container whose first process it is.
// When the keeper dies, the
// agent's watcher (a thread, so that it never waits for anything the agent does) kills everything
// below the agent and ends it, after what the agent has to say to the other nodes. In both cases
// the survivor then removes the folders. A process that dies with the agent's main thread by itself
// (PDEATHSIG) only makes that faster.
//
// The agent has a session of its own and another name in the process table ("ddp-agent"): neither a
// signal to the terminal's process group nor a kill by name takes both at once.
//
// What this cannot survive is SIGKILL to both within the same millisecond.
struct KeeperOptions {
  // Removed at the end in any case.
  std::string runtime_folder;

  // Removed when the keeper or the agent was killed; else they are the agent's business. Empty:
  // none.
  std::string temporary_log_folder;

  // Forwarded to the agent, as HoldSignals() blocked them.
  std::vector<int> signals;

  // How long whoever survives waits for what it has killed. Only a process that is stuck in the
  // kernel needs more than a few milliseconds.
  absl::Duration kill_timeout = absl::Seconds(10);

  // What is returned when one of them ended the agent.
  int stopped_exit_code = 1;

  // How the agent is shown in the process table, over the arguments that main() was called with.
  // Without `argv` only the short name is set.
  std::string agent_title;
  int argc = 0;
  char** argv = nullptr;
};

// What the agent's process is told. Lives as long as the process.
struct AgentContext {
  // True once the keeper is dead and everything is being killed: start nothing any more.
  const std::atomic<bool>* doomed = nullptr;

  // Readable once the keeper is dead.
  int keeper_fd = -1;

  // While true the process, when it has killed everything, waits for a last word, for half a second
  // at most: until 8 bytes are written to `said_fd`, an eventfd.
  std::atomic<bool>* has_last_word = nullptr;
  int said_fd = -1;
};

// Blocks `signals` (not SIGHUP where nohup had it ignored) in the calling thread, until
// RunWithKeeper forwards them. Call it before making the folders: a signal from then on ends the
// job in order.
void HoldSignals(const std::vector<int>& signals);

// For the agent, while it prepares the job: lets a forwarded signal end it at once, which the
// keeper answers by cleaning up. HoldSignals() again before what must end in order.
void ReleaseSignals(const std::vector<int>& signals);

// Readable once one of `signals`, which HoldSignals() holds back, has come: for who waits for
// something else meanwhile. Invalid where no descriptor is left.
UniqueFd WatchHeldSignals(const std::vector<int>& signals);

// Forks; in the child calls `agent` and exits with what it returns; in the parent returns that code
// when the agent has ended and all is cleaned up. When signal N killed the agent: a line on stderr,
// and `stopped_exit_code` if N was forwarded to it, else 128 + N.
//
// Call it on the main thread of a process that has no other, after HoldSignals(). Children that the
// process already has are reaped, but not killed. Errors: kResourceExhausted (no process or
// descriptor to be had), kUnimplemented (a kernel without pidfd_open, older than 5.3); nothing was
// started then.
absl::StatusOr<int> RunWithKeeper(const KeeperOptions& options,
                                  const std::function<int(const AgentContext&)>& agent);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_KEEPER_H_
