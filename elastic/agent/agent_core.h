#ifndef DDP_ELASTIC_AGENT_AGENT_CORE_H_
#define DDP_ELASTIC_AGENT_AGENT_CORE_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/node_failures.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// Decides what the agent of one node does: pure, holds no clock and does no I/O.
//
//                    round              all workers succeeded                 job ended
//   +---------+ ---------------> +---------+ -----------------> +------------+ --------+
//   | joining |                  | running |                    | completing |         |
//   +---------+ <--------+       +---------+                    +------------+         |
//     |     ^            |         |     | drain                    | generation over  |
//     |     |   all have |  fault  |     v                          v                  |
//     |     |   ended    |         |   +----------+              (joining)             |
//     |     |            |         |   | draining |                                    |
//     |     +------------|---------|-- +----------+ all have ended                     |
//     |                  |         v     | fault                                       |
//     |              +----------+ <------+                                             |
//     |              | stopping | ----> the job has ended, or cannot go on ----------> |
//     |              +----------+                                                      v
//     |                  |   signal                                              +---------+
//     |                  v                                                       | leaving |
//     |           +---------------+   all have ended                             +---------+
//     |           | shutting down | ------------------------------------------------> |
//     |           +---------------+ <-- signal in running, draining                    v
//     +--- signal, or no round -----------------------------------------------> (finished)
//
// stopping: a worker failed or hangs, or the generation is over for another reason. The workers got
// SIGTERM and, `fault_grace` later, SIGKILL; a failure here was reported at once, so that the
// verdict is there when the last worker has ended; a hanging worker is reported when it has ended,
// or got SIGKILL, for only then is it known how. An evicted node's workers get SIGKILL at once.
//
// draining: members are about to change; the workers end at one common step where they can, and
// have `shutdown_timeout` for it. shutting down: the same because of the user's signal (the other
// nodes were told to drain), with the end after it; a second SIGINT or SIGTERM kills at once. In
// both a generation that is over leaves them no more than `fault_grace`.
//
// Losing the store changes nothing until `store_outage_timeout` has passed.
//
// "All have ended" means that nothing is left of them either: the processes that workers left
// behind are killed first, for `kill_timeout` at most. What happens meanwhile is taken in as if the
// last worker still ran; a user's signal ends the wait.
//
// The end of the keeper, the process that the user started, ends this one too, and counts before
// the end of a worker: nothing is reported any more, so the node is a lost one. A report that is
// not older than 50 ms was of the same end, and is taken back.
//
// Thread-compatible.
class AgentCore {
 public:
  struct Options {
    int max_restarts = 0;
    int max_nodes = 1;
    std::string role = "default";
    std::string host;  // what other nodes call this one
    absl::Duration rendezvous_timeout = absl::Minutes(10);
    absl::Duration fault_grace = absl::Milliseconds(200);
    absl::Duration shutdown_timeout = absl::Seconds(30);
    // How long the kernel may take to end a process by SIGKILL. One that is stuck in it never ends.
    absl::Duration kill_timeout = absl::Seconds(10);
    absl::Duration exit_barrier_timeout = absl::Minutes(5);
    absl::Duration store_outage_timeout = absl::Minutes(10);
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
  absl::Time next_deadline() const;

  // Valid after FinishAction.
  JobResult result() const;

  uint64_t generation() const { return round_.generation.number; }

  // Whether workers of generation() may be alive, or are still to be started.
  bool has_workers() const { return !living_.empty(); }

  // "joining", "running", "draining", ...: the picture above, for people.
  std::string state_name() const;

 private:
  enum class Phase {
    kJoining,
    kRunning,
    kDraining,
    kStopping,
    kShuttingDown,
    kCompleting,
    kClosing,
    kLeaving,
    kFinished,
  };

  void On(const StartEvent& event);
  void On(const JoinedEvent& event);
  void On(const WorkersStartedEvent& event);
  void On(const WorkerExitedEvent& event);
  void On(const StraysGoneEvent& event);
  void On(const WorkerHungEvent& event);
  void On(const VerdictEvent& event);
  void On(const CompletedEvent& event);
  void On(const DrainedEvent& event);
  void On(const ClosedEvent& event);
  void On(const TakenBackEvent& event);
  void On(const LeftEvent& event);
  void On(const NewsEvent& event);
  void On(const SignalEvent& event);
  void On(const KeeperGoneEvent& event);
  void On(const TickEvent& event);

  void JoinNext();
  void OnRound(const Round& round);
  void OnFailure(WorkerFailure failure);
  void StopForFault();
  void ReportFailures();
  const WorkerFailure* RootCauseHere() const;
  void OnAllEnded();
  void OnNothingLeft();
  bool all_ended() const { return living_.empty() && !strays_left(); }
  bool strays_left() const { return strays_deadline_ != absl::InfiniteFuture(); }
  void ConcludeStop();
  void Complete();
  void OnGenerationOver(const News& news);
  void OnDrain(const News& news);
  void OnEvicted(const News& news);
  void OnJobEnd(const JobEnd& end);
  void ShutDown(int signal);
  void HurryShutDown();
  void StopWorkers(int signal, std::optional<int64_t> stop_at_step);
  void ConcludeShutDown();
  void OnDeadline();
  void OnStoreLost();
  void Abandon(JobEndReason end, std::string text);
  void LeaveBecause(JobEnd end);
  void Leave(JobEndReason end, std::string text);
  void Kill();
  void LeaveStuck();
  void SignalAll(int signal);
  template <typename Action>
  void Ask(Action request);  // in place of the request that is outstanding, if one is
  void CancelRequest();
  template <typename Action>
  void Do(Action action);
  std::vector<int> Living() const { return {living_.begin(), living_.end()}; }

  const Options options_;

  Phase phase_ = Phase::kJoining;
  absl::Time now_ = absl::InfinitePast();               // of the current Step
  absl::Time deadline_ = absl::InfiniteFuture();        // of the phase
  absl::Time store_deadline_ = absl::InfiniteFuture();  // finite while the store is out of reach
  // Finite while what workers left behind is being killed.
  absl::Time strays_deadline_ = absl::InfiniteFuture();
  Decision decision_;   // being built by the current Step
  bool asked_ = false;  // a request is outstanding

  Round round_;           // the last one
  std::set<int> living_;  // local ranks, those that are still to be started included
  int restarts_ = 0;      // the highest charge seen

  // Of the current generation.
  NodeFailures failures_;
  absl::Time reported_at_ = absl::InfinitePast();  // the last report, of any generation
  GenerationId reported_generation_;
  std::optional<absl::StatusOr<FailureVerdict>> verdict_;
  bool over_ = false;       // it is, by another node's doing
  bool evicted_ = false;    // and without this node
  bool stop_sent_ = false;  // StopWorkersAction
  bool kill_sent_ = false;
  bool hurried_ = false;   // HurryShutDown
  bool work_done_ = true;  // no worker has ended before its work was done

  // Why the last generation ended, as far as this node knows; empty before that.
  std::string last_cause_;
  uint64_t last_cause_generation_ = 0;

  std::optional<JobEnd> job_end_;          // the job has ended; workers may still run
  std::optional<JobEndReason> abandoned_;  // this node gives up, workers still run
  std::string abandon_text_;
  int shutdown_signal_ = 0;

  JobEndReason end_ = JobEndReason::kSucceeded;
  std::string end_text_;
  int root_exit_code_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_CORE_H_
