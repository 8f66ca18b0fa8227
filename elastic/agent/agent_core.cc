#include "elastic/agent/agent_core.h"

#include <signal.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::elastic {
namespace {

template <typename... Handlers>
struct Overload : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overload(Handlers...) -> Overload<Handlers...>;

// A worker that ends like this after the agent asked it to end has not failed by itself. Shells and
// interpreters turn the signal into 128 + its number.
bool EndedAsAsked(const ExitStatus& status, bool kill_sent) {
  if (status.succeeded()) return true;
  const int signal = status.signal != 0 ? status.signal : status.exit_code - 128;
  return signal == SIGTERM || (kill_sent && signal == SIGKILL);
}

std::string Workers(size_t count) {
  return absl::StrCat(count, count == 1 ? " worker" : " workers");
}

}  // namespace

std::string DebugString(const AgentAction& action) {
  return std::visit(
      Overload{
          [](const JoinAction& a) {
            return absl::StrCat("join within ", absl::FormatDuration(a.timeout));
          },
          [](const StartWorkersAction&) { return std::string("start the workers"); },
          [](const ReportFailureAction& a) {
            return absl::StrCat("report rank ", a.rank, " within ", absl::FormatDuration(a.timeout),
                                ": ", a.cause);
          },
          [](const CompleteAction& a) {
            return absl::StrCat("complete within ", absl::FormatDuration(a.timeout));
          },
          [](const LeaveAction& a) {
            return absl::StrCat("leave within ", absl::FormatDuration(a.timeout));
          },
          [](const CancelRequestAction&) { return std::string("cancel the request"); },
          [](const SignalWorkersAction& a) {
            return absl::StrCat("send ", SignalName(a.signal), " to local ranks ",
                                absl::StrJoin(a.local_ranks, " "));
          },
          [](const KillStraysAction&) { return std::string("kill strays"); },
          [](const LogRestartAction& a) {
            return absl::StrCat("log restart ", a.restart, ": ", a.reason);
          },
          [](const FinishAction& a) { return absl::StrCat("finish with code ", a.exit_code); },
      },
      action);
}

AgentCore::AgentCore(Options options) : options_(std::move(options)) {}

AgentCore::Decision AgentCore::Step(const AgentEvent& event, absl::Time now) {
  now_ = now;
  decision_ = Decision();
  std::visit([this](const auto& e) { On(e); }, event);
  return std::exchange(decision_, Decision());
}

JobResult AgentCore::result() const {
  JobResult result;
  result.exit_code = exit_code_;
  result.reason = end_reason_;
  // What a user's signal ended, no worker's failure did.
  if (exit_code_ != 0 && shutdown_signal_ == 0) result.failures = failures_;
  return result;
}

template <typename Action>
void AgentCore::Do(Action action) {
  decision_.actions.emplace_back(std::in_place_type<Action>, std::move(action));
}

void AgentCore::On(const StartEvent&) { JoinNext(); }

void AgentCore::JoinNext() {
  phase_ = Phase::kJoining;
  Do(JoinAction{options_.rendezvous_timeout});
}

void AgentCore::On(const RoundEvent& event) {
  if (phase_ != Phase::kJoining) return;  // overtaken by a signal
  if (!event.round.ok()) {
    const std::string cause(event.round.status().message());
    Leave(1, restart_reason_.empty()
                 ? absl::StrCat("the job cannot start: ", cause)
                 : absl::StrCat(restart_reason_, ", and the job cannot restart: ", cause));
    return;
  }
  round_ = *event.round;
  placement_ = PlaceNode(round_);
  restarts_ = round_.restarts;
  failures_.clear();
  verdict_.reset();
  kill_sent_ = false;
  phase_ = Phase::kRunning;
  if (!restart_reason_.empty()) {
    decision_.reason =
        absl::StrCat("restart ", restarts_, " of ", options_.max_restarts, ": generation ",
                     round_.generation.number, ": ", restart_reason_);
    Do(LogRestartAction{restarts_, std::exchange(restart_reason_, std::string())});
  }
  Do(StartWorkersAction{});
}

void AgentCore::On(const WorkersStartedEvent& event) {
  living_.insert(event.started.begin(), event.started.end());
  if (event.status.ok()) return;
  // The program or the machine is at fault: starting it again would end the same way.
  abandon_reason_ = std::string(event.status.message());
  phase_ = Phase::kShuttingDown;
  if (living_.empty()) {
    OnAllEnded();
  } else {
    SignalAll(SIGKILL);
  }
}

void AgentCore::On(const WorkerExitedEvent& event) {
  if (living_.erase(event.local_rank) == 0) return;
  const bool asked = phase_ == Phase::kStopping && EndedAsAsked(event.status, kill_sent_);
  if (!event.status.succeeded() && !asked && phase_ != Phase::kShuttingDown) {
    failures_.push_back({.rank = placement_.first_rank + event.local_rank,
                         .local_rank = event.local_rank,
                         .role = options_.role,
                         .pid = event.pid,
                         .status = event.status,
                         .wall_time = event.wall_time,
                         .error_file = event.status.error_file});
    if (phase_ == Phase::kRunning) OnFirstFailure(failures_.front());
  }
  if (living_.empty()) OnAllEnded();
}

void AgentCore::OnFirstFailure(const WorkerFailure& failure) {
  phase_ = Phase::kStopping;
  // First stop the others: they wait for the dead one, and every millisecond of it is lost.
  if (!living_.empty()) {
    SignalAll(SIGTERM);
    deadline_ = now_ + options_.fault_grace;
  }
  // A budget that is spent is spent, wherever the store is; only a restart needs its consent.
  const bool restart_possible = restarts_ < options_.max_restarts;
  Do(ReportFailureAction{
      failure.rank, absl::StrCat("rank ", failure.rank, " ", DescribeExit(failure.status)),
      restart_possible ? options_.rendezvous_timeout : options_.farewell_timeout});
}

void AgentCore::On(const VerdictEvent& event) {
  if (phase_ != Phase::kStopping) return;  // overtaken by a signal
  verdict_ = event.verdict;
  if (living_.empty()) ConcludeVerdict();
}

void AgentCore::OnAllEnded() {
  deadline_ = absl::InfiniteFuture();
  Do(KillStraysAction{});
  switch (phase_) {
    case Phase::kRunning:
      phase_ = Phase::kCompleting;
      Do(CompleteAction{options_.farewell_timeout});
      break;
    case Phase::kStopping:
      if (verdict_.has_value()) ConcludeVerdict();
      break;
    case Phase::kShuttingDown:
      Leave(1, !abandon_reason_.empty()
                   ? abandon_reason_
                   : absl::StrCat("stopped by ", SignalName(shutdown_signal_)));
      break;
    default:
      break;
  }
}

void AgentCore::ConcludeVerdict() {
  const WorkerFailure& first = failures_.front();
  const std::string cause = absl::StrCat("rank ", first.rank, " ", DescribeExit(first.status));
  if (!verdict_->ok()) {
    if (restarts_ >= options_.max_restarts) {
      Leave(1, cause);
    } else {
      Leave(1, absl::StrCat(cause, ", and the job cannot restart: ", verdict_->status().message()));
    }
    return;
  }
  const FailureVerdict& verdict = **verdict_;
  restarts_ = verdict.restarts;
  switch (verdict.decision) {
    case FailureVerdict::Decision::kStale:
      decision_.reason = absl::StrCat(cause, ", but generation ", round_.generation.number,
                                      " was over already: joining the next one");
      JoinNext();
      break;
    case FailureVerdict::Decision::kRestart:
      restart_reason_ = verdict.root_cause.empty() ? cause : verdict.root_cause;
      JoinNext();
      break;
    case FailureVerdict::Decision::kFail:
      Leave(1,
            options_.max_restarts == 0
                ? cause
                : absl::StrCat(cause, ", and the budget of ", options_.max_restarts,
                               options_.max_restarts == 1 ? " restart" : " restarts", " is spent"));
      break;
  }
}

void AgentCore::On(const CompletedEvent& event) {
  if (phase_ != Phase::kCompleting) return;
  // The workers have done their work: that the store does not hear of it does not undo it.
  if (!event.status.ok()) {
    decision_.reason = absl::StrCat("the workers have succeeded, but the rendezvous was not told: ",
                                    event.status.message());
  }
  Leave(0, "");
}

void AgentCore::On(const SignalEvent& event) {
  switch (phase_) {
    case Phase::kJoining:
    case Phase::kStopping:
      Do(CancelRequestAction{});
      ShutDown(event.signal);
      break;
    case Phase::kRunning:
      ShutDown(event.signal);
      break;
    case Phase::kShuttingDown:
      if (event.signal == SIGINT || event.signal == SIGTERM) {
        decision_.reason = absl::StrCat("received ", SignalName(event.signal),
                                        " while stopping: killing ", Workers(living_.size()));
        SignalAll(SIGKILL);
      } else {
        SignalAll(event.signal);
      }
      break;
    case Phase::kCompleting:
    case Phase::kLeaving:
    case Phase::kFinished:
      break;  // over within farewell_timeout
  }
}

void AgentCore::ShutDown(int signal) {
  const bool was_stopping = phase_ == Phase::kStopping;
  phase_ = Phase::kShuttingDown;
  shutdown_signal_ = signal;
  const std::string received = absl::StrCat("received ", SignalName(signal));
  if (living_.empty()) {
    decision_.reason = absl::StrCat(received, " while no worker runs: leaving");
    Leave(1, absl::StrCat("stopped by ", SignalName(signal)));
    return;
  }
  if (was_stopping) {
    // They have had their SIGTERM, and keep the shorter grace of a fault.
    decision_.reason = absl::StrCat(received, ": no restart any more");
    return;
  }
  if (options_.shutdown_timeout <= absl::ZeroDuration()) {
    decision_.reason = absl::StrCat(received, ": killing ", Workers(living_.size()));
    SignalAll(SIGKILL);
    return;
  }
  decision_.reason = absl::StrCat(received, ": stopping ", Workers(living_.size()), ", at most ",
                                  absl::FormatDuration(options_.shutdown_timeout));
  SignalAll(signal);
  deadline_ = now_ + options_.shutdown_timeout;
}

void AgentCore::On(const TickEvent&) {
  if (now_ < deadline_) return;
  deadline_ = absl::InfiniteFuture();
  if (phase_ != Phase::kStopping && phase_ != Phase::kShuttingDown) return;
  if (phase_ == Phase::kShuttingDown) {
    decision_.reason = absl::StrCat(Workers(living_.size()), " did not end in time after ",
                                    SignalName(shutdown_signal_), ": sending SIGKILL");
  }
  kill_sent_ = true;
  SignalAll(SIGKILL);
}

void AgentCore::Leave(int exit_code, std::string reason) {
  phase_ = Phase::kLeaving;
  exit_code_ = exit_code;
  end_reason_ = std::move(reason);
  Do(LeaveAction{options_.farewell_timeout});
}

void AgentCore::On(const LeftEvent&) {
  // Whether the store has heard the farewell or not: the lease ends it in any case.
  if (phase_ != Phase::kLeaving) return;
  phase_ = Phase::kFinished;
  Do(FinishAction{exit_code_});
}

void AgentCore::SignalAll(int signal) {
  Do(SignalWorkersAction{signal, std::vector<int>(living_.begin(), living_.end())});
}

}  // namespace ddp::elastic
