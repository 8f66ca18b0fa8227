#ifndef DDP_ELASTIC_AGENT_AGENT_CORE_H_
#define DDP_ELASTIC_AGENT_AGENT_CORE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/failed_workers.h"
#include "elastic/agent/job_result.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// Decides the actions of one node's agent. Pure: no clock, no I/O. Agent owns it.
//
// A node joins a round, runs its workers, and ends in one of three ways: all workers succeed
// (completing), a worker fails or the generation is over (stopping), or members are about to change
// (draining: the workers stop at one common step where they can). After the last two it joins
// again. A user's signal shuts it down from anywhere; a second one kills the workers. At the end it
// leaves the job. agent_core.cc draws the states, with the rules of each.
//
// Invariants: "all workers have ended" includes their descendants, which are killed first. A
// failure is reported once, and never after the keeper's end. The loss of the store alone changes
// nothing until `store_outage_timeout` has passed, and nothing at all while workers make steps.
//
// Thread-compatible.
class AgentCore {
 public:
  struct Decision {
    std::vector<AgentAction> actions;
    // A line for the user, without a line end; empty when nothing is new.
    std::string reason;
  };

  // `host`: name by which other nodes know this one.
  AgentCore(JobSpec job, std::string host);

  // Handles one event. `now` never goes back.
  Decision Step(const AgentEvent& event, absl::Time now);

  // Returns the time at which Step(TickEvent) is due; infinite: never.
  absl::Time next_deadline() const;

  // The result of the job; valid after FinishAction.
  JobResult result() const;

  uint64_t generation() const { return part_.round.generation.number; }

  // Returns true when workers of generation() may be alive or are still to be started.
  bool has_workers() const { return !living_.empty(); }

  // Returns a name of the present state for people: "joining", "running", "draining", ... The state
  // completing has the name "completed".
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

  // This node's part in the current generation. A round begins with a new one.
  struct Part {
    Round round;
    FailedWorkers failures;
    std::optional<absl::StatusOr<FailureVerdict>> verdict;
    enum class Standing { kMember, kOver, kEvicted };
    // kOver: another node ended the generation. kEvicted: it goes on without this node.
    Standing standing = Standing::kMember;
    enum class Stop { kNotAsked, kAsked, kHurried };
    // Of StopWorkersAction. kHurried: at once, because the generation is over.
    Stop stop = Stop::kNotAsked;
    struct Killing {
      absl::Time since;
      std::string ending;  // of the last EndingEvent
    };
    std::optional<Killing> killing;  // the workers have got SIGKILL from Kill()
    bool in_order = false;  // the workers were asked to stop by a drain, and none was killed
    bool work_done = true;  // false once a worker has ended before its work was done
    absl::Time stepped_at = absl::InfinitePast();  // last StepEvent
    // Of a stop in order: no progress extends the deadline beyond `stop_limit`, and the first
    // extension beyond `announced_limit` is announced.
    absl::Time stop_limit = absl::InfiniteFuture();
    absl::Time announced_limit = absl::InfiniteFuture();
  };
  // Why this node shuts down.
  struct UserSignal {
    int signal = 0;
    absl::Time at;
  };
  struct GivenUp {
    JobEndReason end;
    std::string text;
  };
  struct StoreOutage {
    absl::Time since;
    absl::Time deadline;
    bool for_good = false;  // of the last kOutOfReach
  };
  struct SentReport {
    GenerationId generation;
    absl::Time at;
  };
  struct Outcome {
    JobEndReason end = JobEndReason::kSucceeded;
    std::string text;
    int root_exit_code = 0;
  };

  void On(const StartEvent& event);
  void On(const AnsweredEvent& event);
  void On(const WorkersStartedEvent& event);
  void On(const WorkerExitedEvent& event);
  void On(const StraysGoneEvent& event);
  void On(const WorkerHungEvent& event);
  void On(const WorkerStuckEvent& event);
  void On(const StepEvent& event);
  void On(const EndingEvent& event);
  void On(const ProgressEvent& event);
  void On(const NewsEvent& event);
  void On(const SignalEvent& event);
  void On(const KeeperGoneEvent& event);
  void On(const TickEvent& event);

  void OnAnswer(const JoinRequest&, const RendezvousAnswer& answer);
  void OnAnswer(const FailureRequest&, const RendezvousAnswer& answer);
  void OnAnswer(const CompleteRequest&, const RendezvousAnswer& answer);
  void OnAnswer(const DrainRequest&, const RendezvousAnswer& answer);
  void OnAnswer(const CloseRequest&, const RendezvousAnswer& answer);
  void OnAnswer(const TakeBackRequest&, const RendezvousAnswer& answer);
  void OnAnswer(const LeaveRequest&, const RendezvousAnswer& answer);

  void JoinNext();
  void OnRound(const Round& round);
  void OnFailure(WorkerFailure failure);
  void StopForFault();
  void ReportFailures();
  const WorkerFailure* RootCauseHere() const;
  void OnAllEnded();
  void OnNothingLeft();
  bool all_ended() const { return living_.empty() && !strays_left(); }
  bool is_killing() const { return part_.killing.has_value(); }
  bool stop_sent() const { return part_.stop != Part::Stop::kNotAsked; }
  // The user's signal that shuts this node down; 0: none.
  int user_signal() const {
    const auto* const signal = std::get_if<UserSignal>(&shut_down_);
    return signal == nullptr ? 0 : signal->signal;
  }
  bool strays_left() const { return strays_deadline_ != absl::InfiniteFuture(); }
  void ConcludeStop();
  void Complete();
  void OnGenerationOver(const News& news);
  void OnDrain(const News& news);
  void OnEvicted(const News& news);
  void OnJobEnd(const JobEnd& end);
  void OnRepeatedSignal(int signal);
  void ShutDown(int signal);
  void HurryShutDown();
  absl::Duration StopPatience() const;
  void BeginStop(absl::Duration patience, absl::Duration limit);
  void ExtendStop();
  void StopWorkers(int signal, std::optional<int64_t> stop_at_step);
  void ConcludeShutDown();
  void OnDeadline();
  void OnStoreLost();
  bool GoesOnWithoutStore(const std::string& lost_for);
  void Abandon(JobEndReason end, std::string text);
  void LeaveBecause(JobEnd end);
  void Leave(JobEndReason end, std::string text);
  void Kill();
  // True while this node is to take part in the next generation.
  bool goes_on() const {
    return (phase_ == Phase::kStopping || phase_ == Phase::kDraining) && !job_end_.has_value();
  }
  void OnStuck();
  void LeaveStuck();
  void SignalAll(int signal);
  // Cancels the outstanding request, if any.
  void Ask(RendezvousRequest request, absl::Duration timeout);
  void CancelRequest();
  template <typename Action>
  void Do(Action action);
  std::vector<int> Living() const { return {living_.begin(), living_.end()}; }

  const JobSpec job_;
  const std::string host_;

  Phase phase_ = Phase::kJoining;
  absl::Time now_ = absl::InfinitePast();         // of the current Step
  absl::Time deadline_ = absl::InfiniteFuture();  // of the phase
  std::optional<StoreOutage> outage_;             // set while the store does not answer
  absl::Duration longest_step_;
  // Finite while processes that workers left behind are being killed.
  absl::Time strays_deadline_ = absl::InfiniteFuture();
  Decision decision_;            // being built by the current Step
  std::optional<size_t> asked_;  // index of the outstanding request in its variant

  Part part_;
  std::set<int> living_;  // local ranks of workers that run or are still to be started
  int restarts_ = 0;      // highest restart count seen

  std::optional<SentReport> last_report_;  // of any generation
  // Why the last generation ended, as far as this node knows; empty before the first end.
  std::string last_cause_;
  uint64_t last_cause_generation_ = 0;

  std::optional<JobEnd> job_end_;  // set when the job has ended; workers may still run
  // Invariant: set in kShuttingDown and kClosing.
  std::variant<std::monostate, UserSignal, GivenUp> shut_down_;
  Outcome outcome_;  // valid in kLeaving and kFinished
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_CORE_H_
