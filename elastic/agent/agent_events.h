#ifndef DDP_ELASTIC_AGENT_AGENT_EVENTS_H_
#define DDP_ELASTIC_AGENT_AGENT_EVENTS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// Events of an agent. -------------------------------------------------------------------------

struct StartEvent {};

// Answers the last RequestAction. A cancelled request gets no answer.
struct AnsweredEvent {
  RendezvousRequest request;
  RendezvousAnswer answer;
};

// Answers StartWorkersAction: WorkerGroup posts one for each action. `started` lists the local
// ranks of the workers that were started; they may have ended since.
// - OK with fewer than all: the agent signalled a worker that was not started yet. That cancelled
//   this start and all later ones.
// - kCancelled: this process is being killed.
// - Any other error: the next worker could not be started, and later workers were not tried.
struct WorkersStartedEvent {
  absl::Status status;
  std::vector<int> started;
  absl::Time wall_time;  // for people
};

struct WorkerExitedEvent {
  int local_rank = 0;
  pid_t pid = 0;
  ExitStatus status;
  absl::Time wall_time;           // for people
  bool is_victim = false;         // its error record says that a peer failed first
  bool stopped_as_asked = false;  // it saw the request to stop, and its work is not done
  bool is_unprompted = false;     // it stops at a common step by itself, and had got no signal
  std::string instead = {};       // why the agent ended it: see WorkerFailure
  absl::Time said_at = absl::InfinitePast();  // see WorkerFailure
};

// KillStraysAction is done: no descendant of the workers is left.
struct StraysGoneEvent {};

// A worker that made progress before makes none now.
struct WorkerHungEvent {
  int local_rank = 0;
  pid_t pid = 0;
  std::string what;  // as from DescribeHang()
  absl::Time wall_time;
  bool is_victim = false;  // it waits for its peers
};

// A worker has been in uninterruptible sleep for AgentTimes::uninterruptible_timeout.
struct WorkerStuckEvent {
  int local_rank = 0;
  pid_t pid = 0;
  std::string what;      // "was in uninterruptible sleep ..."
  absl::Time wall_time;  // for people
};

// A worker of this node has committed a step since the last such event.
struct StepEvent {
  absl::Duration longest_step;  // of this node's workers so far
};

// A worker that was asked to stop has got on: with the steps up to the common one, or with a save.
struct ProgressEvent {};

// A worker that got SIGKILL has not ended yet. Posted at each look.
struct EndingEvent {
  std::string what;       // the end of a line for the user
  bool progress = false;  // it has fewer threads or less memory than at the last look
};

struct NewsEvent {
  News news;
};
struct SignalEvent {
  int signal = 0;
};
// The process that the user started has ended. This process and all below it are being killed.
struct KeeperGoneEvent {};
// The time of next_deadline() has come.
struct TickEvent {};

using AgentEvent =
    std::variant<StartEvent, AnsweredEvent, WorkersStartedEvent, WorkerExitedEvent, StraysGoneEvent,
                 WorkerHungEvent, WorkerStuckEvent, StepEvent, ProgressEvent, EndingEvent,
                 NewsEvent, SignalEvent, KeeperGoneEvent, TickEvent>;

// Actions of an agent, in the order in which to carry them out. ---------------------------------

// A request to the rendezvous; AnsweredEvent follows. One at a time. The agent adds what AgentCore
// does not know: the offer of a join, and the step and progress of a failure.
struct RequestAction {
  RendezvousRequest request;
  absl::Duration timeout;
};
struct CancelRequestAction {};

// Starts the workers of the last round, one after the other; WorkersStartedEvent follows. A signal
// to a worker that is not started yet cancels its start and those of all later workers.
struct StartWorkersAction {};
struct SignalWorkersAction {
  int signal = 0;
  std::vector<int> local_ranks;
};
// Asks workers that poll WorkerSession::should_stop() to stop after `stop_at_step`, and sends
// `signal` to the others. `stop_at_step` -1: stop at once; nullopt: stop soon, at the same step for
// all workers of this node. Replaces an earlier request; no worker gets the signal twice.
struct StopWorkersAction {
  int signal = 0;
  std::optional<int64_t> stop_at_step;
  std::vector<int> local_ranks;
};
// Kills processes that workers left behind. StraysGoneEvent follows, unless a process is stuck in
// the kernel. The next StartWorkersAction ends the wait.
struct KillStraysAction {};

// A new generation follows an earlier one, for `reason`. A charged one is written to the event log.
struct LogRestartAction {
  int restart = 0;  // charged so far, including this one when `charged`
  bool charged = false;
  std::string reason;
};
// The agent has nothing more to report: its process may be killed.
struct FallSilentAction {};
struct FinishAction {
  int exit_code = 0;
};

using AgentAction = std::variant<RequestAction, CancelRequestAction, StartWorkersAction,
                                 SignalWorkersAction, StopWorkersAction, KillStraysAction,
                                 LogRestartAction, FallSilentAction, FinishAction>;

// Returns the action as one line, for traces.
std::string DebugString(const AgentAction& action);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_EVENTS_H_
