#ifndef DDP_ELASTIC_AGENT_AGENT_CORE_H_
#define DDP_ELASTIC_AGENT_AGENT_CORE_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// What can happen to an agent. `Tick`: the time that next_deadline() named has come.
struct StartEvent {};
struct RoundEvent {
  absl::StatusOr<Round> round;
};
// `started` run now, by local rank. Not OK: the next one could not be started, and no more were.
struct WorkersStartedEvent {
  absl::Status status;
  std::vector<int> started;
};
struct WorkerExitedEvent {
  int local_rank = 0;
  pid_t pid = 0;
  ExitStatus status;
  absl::Time wall_time;  // for people
};
struct VerdictEvent {
  absl::StatusOr<FailureVerdict> verdict;
};
struct CompletedEvent {
  absl::Status status;
};
struct LeftEvent {
  absl::Status status;
};
struct SignalEvent {
  int signal = 0;
};
struct TickEvent {};
using AgentEvent = std::variant<StartEvent, RoundEvent, WorkersStartedEvent, WorkerExitedEvent,
                                VerdictEvent, CompletedEvent, LeftEvent, SignalEvent, TickEvent>;

// What an agent wants done, in this order. The first five are requests whose answers are events.
struct JoinAction {
  absl::Duration timeout;
};
struct StartWorkersAction {};  // of the last RoundEvent
struct ReportFailureAction {
  int rank = 0;
  std::string cause;
  absl::Duration timeout;
};
struct CompleteAction {
  absl::Duration timeout;
};
struct LeaveAction {
  absl::Duration timeout;
};
struct CancelRequestAction {};
struct SignalWorkersAction {
  int signal = 0;
  std::vector<int> local_ranks;
};
struct KillStraysAction {};
struct LogRestartAction {
  int restart = 0;
  std::string reason;
};
struct FinishAction {
  int exit_code = 0;
};
using AgentAction =
    std::variant<JoinAction, StartWorkersAction, ReportFailureAction, CompleteAction, LeaveAction,
                 CancelRequestAction, SignalWorkersAction, KillStraysAction, LogRestartAction,
                 FinishAction>;

// One line, for traces.
std::string DebugString(const AgentAction& action);

// Decides what the agent of one node does: pure, holds no clock and does no I/O.
//
//                  round                all workers succeeded
//   +---------+ --------> +---------+ ----------------------> +------------+
//   | joining |           | running |                         | completing |
//   +---------+ <-+       +---------+                         +------------+
//        |        |            | a worker failed                     | answered
//        |   all have ended,   v                                     v
//        |   budget lasts +----------+  all have ended, budget  +---------+
//        |        +------ | stopping | -----------------------> | leaving | --> finished
//        |                +----------+  spent or out of reach   +---------+
//        |                     | signal                              ^
//        |                     v                                     |
//        |              +---------------+    all have ended          |
//        |              | shutting down | ---------------------------+
//        |              +---------------+ <-- signal in running      |
//        +-----------------------------------------------------------+
//          signal, or no round
//
// stopping: the other workers got SIGTERM and, `fault_grace` later, SIGKILL; the failure was
// reported at once, so that the verdict is there when the last worker has ended. shutting down: the
// user's signal was forwarded, `shutdown_timeout` later SIGKILL, at once on a second SIGINT or
// SIGTERM.
//
// Thread-compatible.
class AgentCore {
 public:
  struct Options {
    int max_restarts = 0;
    std::string role = "default";
    absl::Duration rendezvous_timeout = absl::Minutes(10);
    absl::Duration fault_grace = absl::Milliseconds(200);
    absl::Duration shutdown_timeout = absl::Seconds(30);
    // What the rendezvous gets for requests whose answer changes nothing for this node any more.
    absl::Duration farewell_timeout = absl::Seconds(2);
  };

  struct Decision {
    std::vector<AgentAction> actions;
    // For the user, one line without a line end; empty when there is nothing new to say.
    std::string reason;
  };

  explicit AgentCore(Options options);

  // `now` never goes back.
  Decision Step(const AgentEvent& event, absl::Time now);

  // When Step(TickEvent) is due; infinite: never.
  absl::Time next_deadline() const { return deadline_; }

  // Valid after FinishAction.
  JobResult result() const;

  uint64_t generation() const { return round_.generation.number; }

 private:
  enum class Phase {
    kJoining,
    kRunning,
    kStopping,
    kShuttingDown,
    kCompleting,
    kLeaving,
    kFinished,
  };

  void On(const StartEvent& event);
  void On(const RoundEvent& event);
  void On(const WorkersStartedEvent& event);
  void On(const WorkerExitedEvent& event);
  void On(const VerdictEvent& event);
  void On(const CompletedEvent& event);
  void On(const LeftEvent& event);
  void On(const SignalEvent& event);
  void On(const TickEvent& event);

  void OnFirstFailure(const WorkerFailure& failure);
  void OnAllEnded();
  void JoinNext();
  void ConcludeVerdict();
  void ShutDown(int signal);
  void Leave(int exit_code, std::string reason);
  void SignalAll(int signal);
  template <typename Action>
  void Do(Action action);

  const Options options_;

  Phase phase_ = Phase::kJoining;
  absl::Time now_ = absl::InfinitePast();  // of the current Step
  absl::Time deadline_ = absl::InfiniteFuture();
  Decision decision_;  // being built by the current Step

  Round round_;              // the last one
  NodePlacement placement_;  // in it
  std::set<int> living_;     // local ranks
  int restarts_ = 0;         // the highest charge seen

  // Of the current generation.
  std::vector<WorkerFailure> failures_;
  std::optional<absl::StatusOr<FailureVerdict>> verdict_;
  bool kill_sent_ = false;

  std::string abandon_reason_;  // set when workers could not be started
  std::string restart_reason_;  // set while a restart is on its way: the next round tells the user
  int shutdown_signal_ = 0;
  int exit_code_ = 0;
  std::string end_reason_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_CORE_H_
