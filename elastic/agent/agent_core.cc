// Length: one state machine. Each event is handled in every state, and a handler may end the phase
// that another one began. A part would need most of the fields.

#include "elastic/agent/agent_core.h"

#include <signal.h>

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/duration_text.h"

namespace ddp::elastic {
namespace {

// The states of a node, Phase, and what moves it:
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
//     +--- signal, or no round -----------------------> (leaving)             (finished)
//
// stopping: a worker failed or hangs, or the generation is over for another reason. The workers
// have got SIGTERM, and get SIGKILL after `fault_grace`. A failure is reported at once, so the
// verdict arrives while the workers end. A hanging worker is reported after its end or after
// SIGKILL, because only then is its exit status known. An evicted node's workers get SIGKILL at
// once.
//
// draining: members are about to change. The workers stop at one common step where they can, within
// `shutdown_timeout`, or twice the longest step if that is longer. Each progress of a worker gives
// them that time anew, up to AgentTimes::StopLimit().
//
// shutting down: a user's signal stops the workers in the same way, the other nodes are asked to
// drain, and then the agent ends. A known `termination_grace` bounds the time of the workers in
// place of the rule above. A second SIGINT or SIGTERM kills at once. The agent also shuts down when
// the program cannot be started (SIGKILL at once) or the store is lost for too long.
//
// When the generation ends in draining or shutting down, the workers get at most `fault_grace`.
//
// Loss of the store changes nothing until `store_outage_timeout` has passed, and while workers make
// steps it changes nothing at all. Exception: a node that waits in completing leaves after
// kCompletedOutage.
//
// "All have ended" includes descendants: processes that workers left behind are killed first,
// within `kill_timeout`. Until then events are handled as if the last worker still ran. A user's
// signal ends the wait.
//
// The keeper is the process that the user started. Its end also ends this process, and takes
// precedence over the end of a worker: no failure is reported any more, so the node counts as lost.
// In a job of several nodes, a report that is at most 50 ms old is taken back: it is assumed to
// have the same cause.

// Returns true when another try would fail in the same way: no machine could start the program, or
// this system refuses what a worker needs.
bool IsForGood(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsPermissionDenied(status) ||
         absl::IsUnimplemented(status);
}

// Returns true for an exit that the agent's own signal explains: no failure of the worker. Shells
// and interpreters turn signal N into exit code 128 + N.
bool EndedAsAsked(const ExitStatus& status, int asked_by, bool kill_sent) {
  if (status.succeeded()) return true;
  const int signal = status.signal != 0 ? status.signal : status.exit_code - 128;
  return signal == SIGTERM || signal == asked_by || (kill_sent && signal == SIGKILL);
}

constexpr int64_t kStopAtOnce = -1;

// Time that a node whose workers have succeeded waits for an unreachable store.
constexpr absl::Duration kCompletedOutage = absl::Seconds(30);

// A report and the keeper's end within this time have the same cause.
constexpr absl::Duration kTakeBackWindow = absl::Milliseconds(50);

// Signals within this time of the first are the same request: a wrapper and a terminal may both
// send one, each of a kind of its own.
constexpr absl::Duration kRepeatWindow = absl::Milliseconds(500);

std::string Count(size_t count, const char* what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

// Returns true for an end whose cause is on one node: a worker's failure, or a loss.
bool IsFailureOfAWorker(const JobEnd& end) {
  return end.kind == JobEnd::Kind::kBudgetSpent || end.kind == JobEnd::Kind::kNoProgress ||
         end.kind == JobEnd::Kind::kNodesLost;
}

bool IsFailureOfAWorker(JobEndReason end) {
  return end == JobEndReason::kWorkerFailed || end == JobEndReason::kBudgetSpent ||
         end == JobEndReason::kNoProgress;
}

std::string Cause(const WorkerFailure& failure) {
  return absl::StrCat("rank ", failure.rank, " ", DescribeFailure(failure));
}

}  // namespace

AgentCore::AgentCore(JobSpec job, std::string host)
    : job_(std::move(job)), host_(std::move(host)) {}

AgentCore::Decision AgentCore::Step(const AgentEvent& event, absl::Time now) {
  now_ = now;
  decision_ = Decision();
  std::visit([this](const auto& e) { On(e); }, event);
  return std::exchange(decision_, Decision());
}

absl::Time AgentCore::next_deadline() const {
  const absl::Time store_deadline =
      outage_.has_value() ? outage_->deadline : absl::InfiniteFuture();
  return std::min({deadline_, store_deadline, strays_deadline_});
}

JobResult AgentCore::result() const {
  JobResult result;
  result.end = outcome_.end;
  result.exit_code = outcome_.end == JobEndReason::kSucceeded ? 0 : 1;
  result.reason = outcome_.text;
  result.root_exit_code = outcome_.root_exit_code;
  // After a user's signal no worker's failure is the cause.
  if (result.exit_code == 0 || user_signal() != 0) return result;
  const WorkerFailure* const root = RootCauseHere();
  result.failures = part_.failures.InOrder(root);
  if (root == nullptr && (IsFailureOfAWorker(outcome_.end) || !part_.failures.empty())) {
    result.cause_elsewhere = outcome_.text;
    if (IsFailureOfAWorker(outcome_.end) && job_end_.has_value())
      result.cause_host = job_end_->host;
  }
  return result;
}

const WorkerFailure* AgentCore::RootCauseHere() const {
  const bool one_node = job_.limits.max_nodes == 1;
  if (!one_node && job_end_.has_value() && IsFailureOfAWorker(*job_end_)) {
    // The store has decided, and its reason names a rank, which one node has. The reports of an
    // evicted node do not count.
    return part_.standing == Part::Standing::kEvicted ? nullptr
                                                      : part_.failures.CalledBy(job_end_->reason);
  }
  const WorkerFailure* const own = part_.failures.FirstOwn();
  return own == nullptr && one_node ? part_.failures.First() : own;
}

std::string AgentCore::state_name() const {
  switch (phase_) {
    case Phase::kJoining:
      return "joining";
    case Phase::kRunning:
      return "running";
    case Phase::kDraining:
      return "draining";
    case Phase::kStopping:
      return "stopping";
    case Phase::kShuttingDown:
      return "shutting down";
    case Phase::kCompleting:
      return "completed";
    case Phase::kClosing:
    case Phase::kLeaving:
      return "leaving";
    case Phase::kFinished:
      break;
  }
  return "finished";
}

template <typename Action>
void AgentCore::Do(Action action) {
  decision_.actions.emplace_back(std::in_place_type<Action>, std::move(action));
}

void AgentCore::Ask(RendezvousRequest request, absl::Duration timeout) {
  CancelRequest();
  asked_ = request.index();
  Do(RequestAction{std::move(request), timeout});
}

void AgentCore::CancelRequest() {
  if (std::exchange(asked_, std::nullopt).has_value()) Do(CancelRequestAction{});
}

void AgentCore::On(const AnsweredEvent& event) {
  if (asked_ != event.request.index()) return;  // the request was cancelled in the meantime
  asked_.reset();
  std::visit([&](const auto& request) { OnAnswer(request, event.answer); }, event.request);
}

// Joining. ----------------------------------------------------------------------------------------

void AgentCore::On(const StartEvent&) { JoinNext(); }

void AgentCore::JoinNext() {
  phase_ = Phase::kJoining;
  deadline_ = absl::InfiniteFuture();
  Ask(JoinRequest{}, job_.times.rendezvous_timeout);
}

void AgentCore::OnAnswer(const JoinRequest&, const RendezvousAnswer& answer) {
  if (!answer.ok()) {
    const absl::Status& status = answer.status();
    const std::string cause(status.message());
    const JobEndReason end = absl::IsDeadlineExceeded(status) ? JobEndReason::kRendezvousTimeout
                             : absl::IsUnavailable(status)    ? JobEndReason::kStoreLost
                                                              : JobEndReason::kClosed;
    Leave(end, last_cause_.empty()
                   ? absl::StrCat("the job cannot start: ", cause)
                   : absl::StrCat(last_cause_, ", and the job cannot restart: ", cause));
    return;
  }
  if (const auto* end = std::get_if<JobEnd>(&*answer)) {
    LeaveBecause(*end);
    return;
  }
  OnRound(std::get<Round>(*answer));
}

void AgentCore::OnRound(const Round& round) {
  part_ = Part();
  part_.round = round;
  restarts_ = std::max(restarts_, round.restarts);
  phase_ = Phase::kRunning;
  if (!part_.round.reason.empty()) {
    decision_.reason =
        part_.round.charged
            ? absl::StrCat("restart ", restarts_, " of ", job_.limits.max_restarts, ": generation ",
                           part_.round.generation.number, ": ", part_.round.reason)
            : absl::StrCat("generation ", part_.round.generation.number, ": ",
                           Count(part_.round.placement.world_size, "worker"), " on ",
                           Count(part_.round.placement.group_world_size, "node"), ": ",
                           part_.round.reason);
    Do(LogRestartAction{restarts_, part_.round.charged, part_.round.reason});
  }
  for (int i = 0; i < part_.round.placement.local_world_size; ++i) living_.insert(i);
  Do(StartWorkersAction{});
}

void AgentCore::On(const WorkersStartedEvent& event) {
  // Workers that were not started have done no work.
  const std::set<int> started(event.started.begin(), event.started.end());
  if (std::erase_if(living_, [&](int rank) { return !started.contains(rank); }) > 0) {
    part_.work_done = false;
  }
  if (absl::IsCancelled(event.status)) return;  // ddprun is being killed
  if (event.status.ok() || phase_ == Phase::kShuttingDown) {
    if (living_.empty() && !strays_left()) OnAllEnded();
    return;
  }
  if (!IsForGood(event.status)) {
    // The machine is at fault: descriptors, memory, a full disk. The fault may pass, or spare other
    // machines.
    const int local_rank = static_cast<int>(event.started.size());
    OnFailure(
        {.rank = part_.round.placement.first_rank + local_rank,
         .local_rank = local_rank,
         .pid = 0,
         .status = {.exit_code = 1},
         .wall_time = event.wall_time,
         .is_unprompted = true,
         .instead = absl::StrCat("could not be started: ", std::string(event.status.message()))});
    if (living_.empty()) OnAllEnded();
    return;
  }
  CancelRequest();
  Abandon(JobEndReason::kCannotStart, std::string(event.status.message()));
  if (living_.empty()) {
    OnAllEnded();
  } else {
    Kill();
  }
}

// The end of workers. -----------------------------------------------------------------------------

void AgentCore::On(const WorkerExitedEvent& event) {
  if (living_.erase(event.local_rank) == 0 || phase_ == Phase::kFinished) return;
  // A request to stop at a common step explains no signal.
  const bool is_unprompted = event.is_unprompted && phase_ != Phase::kStopping && !is_killing();
  const bool asked = (phase_ == Phase::kStopping || stop_sent()) && !is_unprompted &&
                     EndedAsAsked(event.status, user_signal(), is_killing());
  if (!event.status.succeeded() || event.stopped_as_asked) part_.work_done = false;
  if (part_.failures.Complete(event.local_rank, event.status)) {  // the worker hung
    ReportFailures();
  } else if (!event.status.succeeded() && phase_ != Phase::kShuttingDown) {
    WorkerFailure failure = {.rank = part_.round.placement.first_rank + event.local_rank,
                             .local_rank = event.local_rank,
                             .pid = event.pid,
                             .status = event.status,
                             .wall_time = event.wall_time,
                             .error_file = event.status.error_file,
                             .is_victim = event.is_victim,
                             .is_unprompted = is_unprompted,
                             .said_at = event.said_at,
                             .instead = event.instead};
    const bool came_first = part_.failures.CameFirst(failure);
    failure.was_stopped =
        !came_first && (asked || part_.standing != Part::Standing::kMember || job_end_.has_value());
    if (asked && came_first && failure.instead.empty()) {
      failure.instead = "failed before the others, as its error file says";
    }
    if (asked && !came_first) {
      part_.failures.AddStopped(std::move(failure));
    } else {
      OnFailure(std::move(failure));
    }
  }
  if (living_.empty()) OnAllEnded();
}

void AgentCore::On(const WorkerHungEvent& event) {
  if (phase_ != Phase::kRunning || !living_.contains(event.local_rank)) return;
  OnFailure({.rank = part_.round.placement.first_rank + event.local_rank,
             .local_rank = event.local_rank,
             .pid = event.pid,
             .status = {.signal = SIGKILL},  // replaced if the worker ends before
             .wall_time = event.wall_time,
             .is_victim = event.is_victim,
             .is_unprompted = true,
             .instead = event.what});
}

// The node leaves, and its program is not started again here: the kernel may still hold a device
// for the worker.
void AgentCore::On(const WorkerStuckEvent& event) {
  if (phase_ != Phase::kRunning || !living_.contains(event.local_rank)) return;
  WorkerFailure failure = {.rank = part_.round.placement.first_rank + event.local_rank,
                           .local_rank = event.local_rank,
                           .pid = event.pid,
                           .status = {.signal = SIGKILL},  // replaced if the worker ends before
                           .wall_time = event.wall_time,
                           .is_unprompted = true,
                           .instead = event.what};
  CancelRequest();
  Abandon(JobEndReason::kWorkerFailed, Cause(failure));
  decision_.reason = absl::StrCat(Cause(failure), ": killing ", Count(living_.size(), "worker"));
  part_.failures.Add(std::move(failure));
  Kill();
}

void AgentCore::OnFailure(WorkerFailure failure) {
  part_.failures.Add(std::move(failure));
  if (phase_ == Phase::kRunning || phase_ == Phase::kDraining) StopForFault();
  ReportFailures();
}

// Stops the workers before any request: they wait for the failed one, and each millisecond counts.
void AgentCore::StopForFault() {
  phase_ = Phase::kStopping;
  deadline_ = absl::InfiniteFuture();
  if (living_.empty()) return;
  SignalAll(SIGTERM);
  part_.stop_limit = deadline_ = now_ + job_.times.fault_grace;
}

// The first reported failure ends the generation. After SIGKILL the exit status of a hanging worker
// is not waited for.
void AgentCore::ReportFailures() {
  if (phase_ != Phase::kStopping || asked_) return;
  const FailedWorkers::Report report =
      part_.failures.TakeNextReport(is_killing() ? std::set<int>() : living_);
  const WorkerFailure* const next = report.failure;
  if (next == nullptr) return;
  if (!next->was_stopped &&
      (last_cause_generation_ != part_.round.generation.number || !next->is_victim)) {
    last_cause_generation_ = part_.round.generation.number;
    last_cause_ = Cause(*next);
  }
  if (outage_.has_value()) {
    decision_.reason =
        absl::StrCat(last_cause_, ": waiting for the rendezvous, which is out of reach, at most ",
                     DurationText(outage_->deadline - now_));
  }
  // With one node, a spent budget ends the job even without the store; only a restart needs its
  // answer.
  const bool restart_possible = job_.limits.max_nodes > 1 || restarts_ < job_.limits.max_restarts;
  last_report_ = SentReport{.generation = part_.round.generation, .at = now_};
  Ask(FailureRequest{.generation = part_.round.generation,
                     .rank = next->rank,
                     .cause = Cause(*next),
                     .is_victim = next->is_victim,
                     .is_unprompted = next->is_unprompted,
                     .exit_code = ShellExitCode(next->status),
                     .instead_of = report.instead_of},
      restart_possible ? job_.times.rendezvous_timeout : job_.times.farewell_timeout);
}

void AgentCore::OnAnswer(const FailureRequest&, const RendezvousAnswer& answer) {
  part_.verdict = AnswerAs<FailureVerdict>(answer);
  ReportFailures();
  if (all_ended()) ConcludeStop();
}

// Processes that workers left behind may hold ports, devices and files.
void AgentCore::OnAllEnded() {
  deadline_ = absl::InfiniteFuture();
  strays_deadline_ = now_ + job_.times.kill_timeout;
  Do(KillStraysAction{});
}

void AgentCore::On(const StraysGoneEvent&) {
  if (strays_left()) OnNothingLeft();
}

void AgentCore::OnNothingLeft() {
  strays_deadline_ = deadline_ = absl::InfiniteFuture();
  switch (phase_) {
    case Phase::kRunning:
      Complete();
      break;
    case Phase::kDraining:
      part_.work_done ? Complete() : JoinNext();
      break;
    case Phase::kStopping:
      ConcludeStop();
      break;
    case Phase::kShuttingDown:
      ConcludeShutDown();
      break;
    default:
      break;
  }
}

void AgentCore::ConcludeStop() {
  if (job_end_.has_value()) return LeaveBecause(*job_end_);
  if (asked_) return;  // for the verdict
  if (!part_.verdict.has_value() ||
      (part_.verdict->ok() && part_.standing != Part::Standing::kMember))
    return JoinNext();
  if (!part_.verdict->ok()) {
    const bool one_node = job_.limits.max_nodes == 1 && restarts_ >= job_.limits.max_restarts;
    if (one_node) return LeaveBecause({.kind = JobEnd::Kind::kBudgetSpent, .reason = last_cause_});
    return Leave(JobEndReason::kStoreLost,
                 absl::StrCat(last_cause_, ", and the job cannot restart: ",
                              std::string(part_.verdict->status().message())));
  }
  const FailureVerdict& verdict = **part_.verdict;
  switch (verdict.decision) {
    case FailureVerdict::Decision::kStale:
      decision_.reason =
          absl::StrCat(last_cause_, ", but generation ", part_.round.generation.number,
                       " was over already: joining the next one");
      JoinNext();
      break;
    case FailureVerdict::Decision::kRestart:
      JoinNext();
      break;
    case FailureVerdict::Decision::kEnded:
      LeaveBecause(verdict.end);
      break;
  }
}

// Completing. -------------------------------------------------------------------------------------

void AgentCore::Complete() {
  phase_ = Phase::kCompleting;
  // Without this request, other nodes would count this node's leave as a loss.
  Ask(CompleteRequest{part_.round.generation},
      job_.limits.max_nodes > 1 ? std::max(job_.times.farewell_timeout, kCompletedOutage)
                                : job_.times.farewell_timeout);
}

void AgentCore::OnAnswer(const CompleteRequest&, const RendezvousAnswer& answer) {
  if (answer.ok()) {
    // Other nodes still run. If one of them fails, this node takes part in the next generation.
    deadline_ = now_ + job_.times.exit_barrier_timeout;
    return;
  }
  if (absl::IsAborted(answer.status())) return JoinNext();
  // The workers have succeeded, even if the store cannot be informed.
  decision_.reason = absl::StrCat("the workers have succeeded, but the rendezvous was not told: ",
                                  std::string(answer.status().message()));
  Leave(JobEndReason::kSucceeded, "");
}

// News. -------------------------------------------------------------------------------------------

void AgentCore::On(const NewsEvent& event) {
  const News& news = event.news;
  switch (news.kind) {
    case News::Kind::kGenerationOver:
      if (news.generation == part_.round.generation) OnGenerationOver(news);
      break;
    case News::Kind::kDrain:
      if (news.generation == part_.round.generation) OnDrain(news);
      break;
    case News::Kind::kJobEnded:
      OnJobEnd(news.end);
      break;
    case News::Kind::kEvicted:
      OnEvicted(news);
      break;
    case News::Kind::kWaiting:
      if (phase_ == Phase::kJoining) decision_.reason = absl::StrCat("waiting: ", news.cause);
      break;
    case News::Kind::kOutOfReach:
      if (outage_.has_value()) {
        outage_->for_good = news.for_good;
        break;
      }
      outage_ = StoreOutage{.since = now_,
                            .deadline = now_ + job_.times.store_outage_timeout,
                            .for_good = news.for_good};
      // This node may never learn whether the other nodes have succeeded too.
      if (phase_ == Phase::kCompleting && !asked_) {
        deadline_ = std::min(deadline_, now_ + kCompletedOutage);
      }
      decision_.reason = absl::StrCat("the rendezvous is out of reach",
                                      living_.empty() ? ": " : ", the workers go on: ", news.cause);
      break;
    case News::Kind::kStoreWarning:
      decision_.reason = news.cause;
      break;
    case News::Kind::kBackInReach:
      if (std::exchange(outage_, std::nullopt).has_value()) {
        decision_.reason = "the rendezvous is in reach again";
      }
      break;
  }
}

void AgentCore::OnGenerationOver(const News& news) {
  switch (phase_) {
    case Phase::kRunning:
    case Phase::kDraining:
      decision_.reason =
          absl::StrCat("generation ", part_.round.generation.number, " is over: ", news.cause,
                       ": stopping ", Count(living_.size(), "worker"));
      part_.standing = Part::Standing::kOver;
      last_cause_ = news.cause;
      StopForFault();
      if (all_ended()) ConcludeStop();
      break;
    case Phase::kStopping:
      part_.standing = std::max(part_.standing, Part::Standing::kOver);
      break;
    case Phase::kCompleting:
      last_cause_ = news.cause;
      JoinNext();
      break;
    case Phase::kShuttingDown:
      HurryShutDown();
      break;
    default:
      break;
  }
}

void AgentCore::OnDrain(const News& news) {
  part_.in_order = !is_killing() && (phase_ == Phase::kRunning || !stop_sent());
  if (phase_ == Phase::kShuttingDown && !stop_sent()) {
    StopWorkers(user_signal(), news.stop_at_step);
  } else if (phase_ == Phase::kRunning) {
    phase_ = Phase::kDraining;
    last_cause_ = news.cause;
    decision_.reason =
        absl::StrCat(news.cause, ": stopping ", Count(living_.size(), "worker"),
                     news.stop_at_step < 0 ? "" : absl::StrCat(" after step ", news.stop_at_step),
                     ", at most ", absl::FormatDuration(StopPatience()));
    if (living_.empty()) return;  // their remaining processes are being killed
    BeginStop(StopPatience(), job_.times.StopLimit());
    StopWorkers(SIGTERM, news.stop_at_step);
  }
}

// The other nodes go on without this one. Its workers must not disturb them, so they are killed
// without a request to the store.
void AgentCore::OnEvicted(const News& news) {
  if (phase_ == Phase::kJoining || phase_ == Phase::kClosing || phase_ == Phase::kLeaving ||
      phase_ == Phase::kFinished) {
    return;
  }
  decision_.reason = absl::StrCat("this node is no member any more: ", news.cause,
                                  living_.empty() ? "" : ": killing ",
                                  living_.empty() ? "" : Count(living_.size(), "worker"));
  if (phase_ == Phase::kShuttingDown) return Kill();
  CancelRequest();
  part_.verdict.reset();
  part_.standing = Part::Standing::kEvicted;
  part_.failures.StopReports();
  last_cause_ = news.cause;
  phase_ = Phase::kStopping;
  deadline_ = absl::InfiniteFuture();
  if (all_ended()) return ConcludeStop();
  Kill();
}

void AgentCore::OnJobEnd(const JobEnd& end) {
  switch (phase_) {
    case Phase::kRunning:
    case Phase::kDraining:
      job_end_ = end;
      StopForFault();
      if (all_ended()) ConcludeStop();
      break;
    case Phase::kStopping:
      job_end_ = end;
      if (is_killing()) deadline_ = std::min(deadline_, now_ + job_.times.kill_timeout);
      if (all_ended()) ConcludeStop();
      break;
    case Phase::kCompleting:
      LeaveBecause(end);
      break;
    case Phase::kShuttingDown:
      HurryShutDown();
      break;
    default:
      break;  // joining: the answer to Join says the same
  }
}

// The user's signals. -----------------------------------------------------------------------------

void AgentCore::On(const SignalEvent& event) {
  // Remaining processes of the workers do no work of the job, so a user's signal does not wait for
  // them.
  if (strays_left()) OnNothingLeft();
  switch (phase_) {
    case Phase::kJoining:
    case Phase::kRunning:
    case Phase::kDraining:
    case Phase::kStopping:
      ShutDown(event.signal);
      break;
    case Phase::kCompleting:
      if (asked_ && job_.limits.max_nodes == 1) break;  // over within farewell_timeout
      decision_.reason = absl::StrCat("received ", SignalName(event.signal),
                                      " while other nodes still work: leaving");
      Leave(JobEndReason::kSucceeded, "");
      break;
    case Phase::kShuttingDown:
      if (const auto* const first = std::get_if<UserSignal>(&shut_down_);
          first != nullptr && now_ - first->at < kRepeatWindow) {
        OnRepeatedSignal(event.signal);
        break;
      }
      if (event.signal == SIGINT || event.signal == SIGTERM) {
        decision_.reason =
            absl::StrCat("received ", SignalName(event.signal), " while stopping: killing ",
                         Count(living_.size(), "worker"));
        SignalAll(SIGKILL);
      } else if (event.signal != SIGHUP) {  // the terminal of a stopped job may go away
        SignalAll(event.signal);
      }
      break;
    case Phase::kClosing:
    case Phase::kLeaving:
    case Phase::kFinished:
      break;  // over within farewell_timeout
  }
}

// A repeat is the same request. After a hangup, which a worker may ignore, a stop is still sent on.
void AgentCore::OnRepeatedSignal(int signal) {
  const bool stops = signal == SIGINT || signal == SIGTERM;
  if (user_signal() != SIGHUP || !stops) return;
  std::get<UserSignal>(shut_down_).signal = signal;
  if (stop_sent() && !living_.empty()) StopWorkers(signal, std::nullopt);
}

void AgentCore::ShutDown(int signal) {
  const Phase phase = std::exchange(phase_, Phase::kShuttingDown);
  shut_down_ = UserSignal{.signal = signal, .at = now_};
  const std::string received = absl::StrCat("received ", SignalName(signal));
  const bool knows_grace = job_.times.termination_grace > absl::ZeroDuration();
  const absl::Duration limit =
      knows_grace ? job_.times.WorkersShareOfGrace() : job_.times.StopLimit();
  const absl::Duration patience = knows_grace ? limit : StopPatience();
  if (phase != Phase::kRunning) CancelRequest();
  if (living_.empty()) {
    decision_.reason = absl::StrCat(received, " while no worker runs: leaving");
    Leave(JobEndReason::kPreempted, absl::StrCat("stopped by ", SignalName(signal)));
    return;
  }
  if (phase == Phase::kStopping || phase == Phase::kDraining) {
    // The workers have been asked to stop, and keep their deadline.
    decision_.reason = absl::StrCat(received, ": no restart any more");
    if (knows_grace && !is_killing()) {
      part_.stop_limit = std::min(part_.stop_limit, now_ + limit);
      deadline_ = std::min(deadline_, part_.stop_limit);
    }
    if (is_killing()) deadline_ = std::min(deadline_, now_ + job_.times.kill_timeout);
    return;
  }
  const bool others = part_.round.placement.group_world_size > 1;
  if (others) {
    // Drain before the first worker ends, so that no node counts its end as a failure.
    Ask(DrainRequest{part_.round.generation,
                     absl::StrCat("node ", host_, " leaves (", SignalName(signal), ")")},
        job_.times.farewell_timeout);
  }
  if (limit <= absl::ZeroDuration()) {
    decision_.reason = absl::StrCat(received, ": killing ", Count(living_.size(), "worker"));
    Kill();
    return;
  }
  decision_.reason = absl::StrCat(received, ": stopping ", Count(living_.size(), "worker"),
                                  ", at most ", absl::FormatDuration(patience));
  BeginStop(patience, limit);
  if (!others) StopWorkers(signal, std::nullopt);
}

void AgentCore::OnAnswer(const DrainRequest&, const RendezvousAnswer& answer) {
  // After OK, kDrain follows with the step at which all nodes stop.
  if (absl::IsAborted(answer.status())) {
    HurryShutDown();
  } else if (!answer.ok() && !stop_sent()) {
    StopWorkers(user_signal(), std::nullopt);
  }
}

// The generation is over. The common step will not be reached, because peers have ended. Workers
// that wait for peers would use up the user's shutdown_timeout.
void AgentCore::HurryShutDown() {
  if (is_killing() || living_.empty() || part_.stop == Part::Stop::kHurried) return;
  StopWorkers(user_signal() == 0 ? SIGTERM : user_signal(), kStopAtOnce);
  part_.stop = Part::Stop::kHurried;
  deadline_ = std::min(deadline_, now_ + job_.times.fault_grace);
}

// A stop takes at least the rest of the present step.
absl::Duration AgentCore::StopPatience() const {
  return std::min(std::max(job_.times.shutdown_timeout, 2 * longest_step_), job_.times.StopLimit());
}

void AgentCore::BeginStop(absl::Duration patience, absl::Duration limit) {
  part_.stop_limit = now_ + limit;
  part_.announced_limit = deadline_ = now_ + patience;
}

void AgentCore::On(const StepEvent& event) {
  part_.stepped_at = now_;
  // A stop may have begun before the length of the last step was known.
  const absl::Duration before =
      std::exchange(longest_step_, std::max(longest_step_, event.longest_step));
  if (longest_step_ > before) ExtendStop();
}

void AgentCore::On(const ProgressEvent&) { ExtendStop(); }

void AgentCore::ExtendStop() {
  const bool stops = phase_ == Phase::kDraining || phase_ == Phase::kShuttingDown;
  if (!stops || is_killing() || (part_.stop == Part::Stop::kHurried) || living_.empty()) return;
  deadline_ = std::max(deadline_, std::min(now_ + StopPatience(), part_.stop_limit));
  if (now_ < part_.announced_limit || deadline_ <= now_) return;
  part_.announced_limit = absl::InfiniteFuture();
  decision_.reason = absl::StrCat(Count(living_.size(), "worker"),
                                  " did not end in time, but made progress: at most ",
                                  DurationText(part_.stop_limit - now_), " more");
}

void AgentCore::StopWorkers(int signal, std::optional<int64_t> stop_at_step) {
  part_.stop = std::max(part_.stop, Part::Stop::kAsked);
  Do(StopWorkersAction{signal, stop_at_step, Living()});
}

void AgentCore::ConcludeShutDown() {
  const auto* const given_up = std::get_if<GivenUp>(&shut_down_);
  if (given_up == nullptr) {
    return Leave(JobEndReason::kPreempted, absl::StrCat("stopped by ", SignalName(user_signal())));
  }
  if (given_up->end != JobEndReason::kCannotStart) return Leave(given_up->end, given_up->text);
  // Close the job, so that no other node waits for this one.
  phase_ = Phase::kClosing;
  Ask(CloseRequest{{.kind = JobEnd::Kind::kClosed,
                    .reason = absl::StrCat("node ", host_, ": ", given_up->text)}},
      job_.times.farewell_timeout);
}

void AgentCore::OnAnswer(const CloseRequest&, const RendezvousAnswer&) {
  const auto& given_up = std::get<GivenUp>(shut_down_);
  Leave(given_up.end, given_up.text);
}

// Deadlines. --------------------------------------------------------------------------------------

void AgentCore::On(const TickEvent&) {
  if (now_ >= strays_deadline_) {
    decision_.reason =
        absl::StrCat("some processes of the workers did not end by SIGKILL within ",
                     DurationText(job_.times.kill_timeout), " (--kill-timeout): going on without");
    OnNothingLeft();
  }
  if (outage_.has_value() && now_ >= outage_->deadline) OnStoreLost();
  if (now_ >= deadline_) OnDeadline();
}

void AgentCore::OnDeadline() {
  deadline_ = absl::InfiniteFuture();
  if (is_killing() && phase_ != Phase::kCompleting) return OnStuck();
  switch (phase_) {
    case Phase::kCompleting:
      decision_.reason = absl::StrCat(
          outage_.has_value() ? "nothing is heard of other nodes"
                              : absl::StrCat("other nodes still work after ",
                                             absl::FormatDuration(job_.times.exit_barrier_timeout)),
          ": leaving, the workers of this node have succeeded");
      Leave(JobEndReason::kSucceeded, "");
      return;
    case Phase::kDraining:
    case Phase::kShuttingDown:
      decision_.reason = absl::StrCat(
          Count(living_.size(), "worker"), " did not end in time after ",
          SignalName(user_signal() == 0 ? SIGTERM : user_signal()), ": sending SIGKILL");
      break;
    default:
      break;
  }
  Kill();
}

void AgentCore::Kill() {
  if (living_.empty()) return;
  part_.killing = Part::Killing{.since = now_, .ending = ""};
  SignalAll(SIGKILL);
  deadline_ = now_ + job_.times.kill_timeout;
  ReportFailures();
}

void AgentCore::On(const EndingEvent& event) {
  if (!is_killing() || living_.empty()) return;
  part_.killing->ending = event.what;
  const bool waits_longer = deadline_ > part_.killing->since + job_.times.kill_timeout;
  if (waits_longer && event.progress && goes_on()) {
    deadline_ = std::max(deadline_, now_ + job_.times.kill_timeout);
  }
}

// The node is healthy when the kernel only takes its time. A node that leaves anyway does not wait.
void AgentCore::OnStuck() {
  const absl::Time limit = part_.killing->since + job_.times.stuck_timeout;
  if (!goes_on() || part_.killing->ending.empty() || now_ >= limit) return LeaveStuck();
  deadline_ = limit;
  decision_.reason = absl::StrCat(
      Count(living_.size(), "worker"), " did not end by SIGKILL within ",
      DurationText(job_.times.kill_timeout), " (--kill-timeout): ", part_.killing->ending,
      ": waiting ", DurationText(job_.times.stuck_timeout),
      " in all (--stuck-timeout), or as long as it gives back memory");
}

// Leave, so that the other nodes do not wait for this one.
void AgentCore::LeaveStuck() {
  const absl::Duration took =
      std::max(job_.times.kill_timeout, absl::Trunc(now_ - part_.killing->since, absl::Seconds(1)));
  const std::string text = absl::StrCat(Count(living_.size(), "worker"), " of node ", host_,
                                        " did not end by SIGKILL within ", DurationText(took));
  Leave(user_signal() != 0 ? JobEndReason::kPreempted : JobEndReason::kCannotStart, text);
}

// Ends a wait for the store that has lasted too long, unless workers make steps.
void AgentCore::OnStoreLost() {
  const std::string lost_for =
      absl::FormatDuration(absl::Trunc(now_ - outage_->since, absl::Seconds(1)));
  std::string text = absl::StrCat("the rendezvous was out of reach for ", lost_for);
  const bool works = phase_ == Phase::kRunning && !living_.empty();
  if (works && GoesOnWithoutStore(lost_for)) return;
  outage_.reset();
  if (works) {
    if (part_.stepped_at != absl::InfinitePast()) {
      absl::StrAppend(&text, ", and the workers made no step for ",
                      absl::FormatDuration(job_.times.store_outage_timeout));
    }
    decision_.reason = absl::StrCat(text, ": stopping ", Count(living_.size(), "worker"));
    Abandon(JobEndReason::kStoreLost, text);
    BeginStop(StopPatience(), job_.times.StopLimit());
    StopWorkers(SIGTERM, std::nullopt);
  } else if ((phase_ == Phase::kJoining || phase_ == Phase::kStopping) && living_.empty()) {
    Leave(JobEndReason::kStoreLost,
          last_cause_.empty() ? absl::StrCat("the job cannot start: ", text)
                              : absl::StrCat(last_cause_, ", and the job cannot restart: ", text));
  }
}

// Steps prove that the work goes on. Workers that have told of no step cannot show that it stopped.
bool AgentCore::GoesOnWithoutStore(const std::string& lost_for) {
  const absl::Duration patience = job_.times.store_outage_timeout;
  const bool counts_steps = part_.stepped_at != absl::InfinitePast();
  if (counts_steps ? now_ - part_.stepped_at >= patience : outage_->for_good) return false;
  outage_->deadline = (counts_steps ? part_.stepped_at : now_) + patience;
  if (now_ - outage_->since < 2 * patience) {  // one line is enough
    decision_.reason =
        absl::StrCat("the rendezvous has been out of reach for ", lost_for,
                     ": the workers go on, but no failure of one can be repaired until it is back");
  }
  return true;
}

void AgentCore::Abandon(JobEndReason end, std::string text) {
  phase_ = Phase::kShuttingDown;
  shut_down_ = GivenUp{end, std::move(text)};
}

// The end. ----------------------------------------------------------------------------------------

void AgentCore::LeaveBecause(JobEnd end) {
  const WorkerFailure* const called = part_.failures.CalledBy(end.reason);
  if (job_.limits.max_nodes == 1 && IsFailureOfAWorker(end) && called != nullptr) {
    // The first report ended this one-node job, but an earlier failure was seen after the report.
    const WorkerFailure* const root = RootCauseHere();
    if (root != nullptr && root != called) {
      end.reason = Cause(*root);
      end.exit_code = ShellExitCode(root->status);
    }
  }
  job_end_ = end;
  outcome_.root_exit_code = end.exit_code;
  switch (end.kind) {
    case JobEnd::Kind::kSucceeded:
      return Leave(JobEndReason::kSucceeded, "");
    case JobEnd::Kind::kBudgetSpent:
      if (job_.limits.max_restarts == 0) return Leave(JobEndReason::kWorkerFailed, end.reason);
      return Leave(JobEndReason::kBudgetSpent,
                   absl::StrCat(end.reason, ", and the budget of ",
                                Count(job_.limits.max_restarts, "restart"), " is spent"));
    case JobEnd::Kind::kNoProgress:
      return Leave(JobEndReason::kNoProgress,
                   absl::StrCat(end.reason,
                                ", and the job makes no progress: its last generations "
                                "ended without one step"));
    case JobEnd::Kind::kNodesLost:
      return Leave(JobEndReason::kBudgetSpent, end.reason);
    case JobEnd::Kind::kClosed:
      return Leave(JobEndReason::kClosed, absl::StrCat("the job was closed: ", end.reason));
  }
}

void AgentCore::Leave(JobEndReason end, std::string text) {
  phase_ = Phase::kLeaving;
  deadline_ = strays_deadline_ = absl::InfiniteFuture();
  outage_.reset();
  outcome_.end = end;
  outcome_.text = std::move(text);
  const WorkerFailure* const root = RootCauseHere();
  if (outcome_.root_exit_code == 0 && root != nullptr) {
    outcome_.root_exit_code = ShellExitCode(root->status);
  }
  Ask(LeaveRequest{part_.in_order}, job_.times.farewell_timeout);
}

// The answer does not matter: the lease runs out in any case.
void AgentCore::OnAnswer(const LeaveRequest&, const RendezvousAnswer&) {
  phase_ = Phase::kFinished;
  Do(FinishAction{result().exit_code});
}

// The keeper's watcher kills the workers.
void AgentCore::On(const KeeperGoneEvent&) {
  if (phase_ == Phase::kFinished) return;
  phase_ = Phase::kFinished;
  deadline_ = strays_deadline_ = absl::InfiniteFuture();
  outage_.reset();
  CancelRequest();
  if (job_.limits.max_nodes > 1 && last_report_.has_value() &&
      now_ - last_report_->at <= kTakeBackWindow) {
    Ask(TakeBackRequest{last_report_->generation}, job_.times.farewell_timeout);
  } else {
    Do(FallSilentAction{});
  }
}

void AgentCore::OnAnswer(const TakeBackRequest&, const RendezvousAnswer&) {
  Do(FallSilentAction{});
}

void AgentCore::SignalAll(int signal) {
  if (signal == SIGKILL && part_.stop != Part::Stop::kHurried) part_.in_order = false;
  Do(SignalWorkersAction{signal, Living()});
}

}  // namespace ddp::elastic
