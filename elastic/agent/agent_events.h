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

// What can happen to an agent. ----------------------------------------------------------------

struct StartEvent {};

// Answers to the requests below. A request that was cancelled has none.
struct JoinedEvent {
  absl::StatusOr<JoinAnswer> answer;
};
struct VerdictEvent {
  absl::StatusOr<FailureVerdict> verdict;
};
struct CompletedEvent {
  absl::Status status;
};
struct DrainedEvent {
  absl::Status status;
};
struct ClosedEvent {
  absl::Status status;
};
struct TakenBackEvent {
  absl::Status status;
};
struct LeftEvent {
  absl::Status status;
};

// What has become of StartWorkersAction: `started` were started, by local rank, and may have ended
// since. Not OK: the next one could not be started, and no more were. OK with fewer than all: a
// signal for those that were still to be started took their place.
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
  bool is_victim = false;         // its error says that a peer failed first
  bool stopped_as_asked = false;  // it has seen that it should stop, and its work is not done
  std::string instead = {};       // see WorkerFailure: why the agent ended it
  absl::Time said_at = absl::InfinitePast();  // see WorkerFailure
};

// KillStraysAction is done: nothing is left of the workers.
struct StraysGoneEvent {};

// A worker makes no progress, though it did.
struct WorkerHungEvent {
  int local_rank = 0;
  pid_t pid = 0;
  std::string what;  // "made no step for 42s (longest so far 1s), in its backward"
  absl::Time wall_time;
  bool is_victim = false;  // it waits for its peers
};

struct NewsEvent {
  News news;
};
struct SignalEvent {
  int signal = 0;
};
// The process that the user started is gone: this one and all below it are being killed.
struct KeeperGoneEvent {};
// The time that next_deadline() named has come.
struct TickEvent {};

using AgentEvent =
    std::variant<StartEvent, JoinedEvent, WorkersStartedEvent, WorkerExitedEvent, StraysGoneEvent,
                 WorkerHungEvent, VerdictEvent, CompletedEvent, DrainedEvent, ClosedEvent,
                 TakenBackEvent, LeftEvent, NewsEvent, SignalEvent, KeeperGoneEvent, TickEvent>;

// What an agent wants done, in this order. ----------------------------------------------------

// Requests to the rendezvous; one at a time.
struct JoinAction {
  absl::Duration timeout;
};
struct ReportFailureAction {
  int rank = 0;
  std::string cause;
  bool is_victim = false;
  int exit_code = 1;  // as a shell has it
  absl::Duration timeout;
  // The rank whose failure this node has reported before, and which this one preceded; -1: none.
  int instead_of = -1;
};
struct CompleteAction {
  absl::Duration timeout;
};
struct DrainAction {
  std::string cause;
  absl::Duration timeout;
};
struct CloseAction {
  JobEnd end;
  absl::Duration timeout;
};
struct TakeBackAction {
  GenerationId generation;  // of the report
  absl::Duration timeout;
};
struct LeaveAction {
  absl::Duration timeout;
};
struct CancelRequestAction {};

// Of the last round, one after the other; WorkersStartedEvent follows. A worker that is sent a
// signal before it was started is not started any more, and neither are those behind it.
struct StartWorkersAction {};
struct SignalWorkersAction {
  int signal = 0;
  std::vector<int> local_ranks;
};
// Workers that look at WorkerSession::should_stop() are told to stop after `stop_at_step`, the
// others get `signal`. A step of -1: at once. None: the same step for all workers of this node,
// soon. Replaces an earlier one; a worker that has got its signal gets no second one.
struct StopWorkersAction {
  int signal = 0;
  std::optional<int64_t> stop_at_step;
  std::vector<int> local_ranks;
};
// Kills what workers left behind; StraysGoneEvent follows, or, where a process is stuck in the
// kernel, does not. Ends with the next StartWorkersAction.
struct KillStraysAction {};

// For the event log: a new generation after an earlier one, and why.
struct LogRestartAction {
  int restart = 0;  // charged so far, this one included when `charged`
  bool charged = false;
  std::string reason;
};
// Nothing more is to be said, and the process may be killed.
struct FallSilentAction {};
struct FinishAction {
  int exit_code = 0;
};

using AgentAction =
    std::variant<JoinAction, ReportFailureAction, CompleteAction, DrainAction, CloseAction,
                 TakeBackAction, LeaveAction, CancelRequestAction, StartWorkersAction,
                 SignalWorkersAction, StopWorkersAction, KillStraysAction, LogRestartAction,
                 FallSilentAction, FinishAction>;

// One line, for traces.
std::string DebugString(const AgentAction& action);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_EVENTS_H_
