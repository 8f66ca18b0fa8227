#include "elastic/agent/agent_events.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::elastic {
namespace {

std::string Within(absl::Duration timeout) {
  return absl::StrCat(" within ", absl::FormatDuration(timeout));
}

std::string LocalRanks(const std::vector<int>& local_ranks) {
  return absl::StrCat(" local ranks ", absl::StrJoin(local_ranks, " "));
}

std::string Describe(const JoinAction& a) { return absl::StrCat("join", Within(a.timeout)); }

std::string Describe(const ReportFailureAction& a) {
  return absl::StrCat("report rank ", a.rank, a.is_victim ? " as a victim" : "",
                      a.is_unprompted ? " unprompted" : "",
                      a.instead_of >= 0 ? absl::StrCat(" instead of rank ", a.instead_of) : "",
                      Within(a.timeout), ": ", a.cause);
}

std::string Describe(const CompleteAction& a) {
  return absl::StrCat("complete", Within(a.timeout));
}

std::string Describe(const DrainAction& a) {
  return absl::StrCat("drain", Within(a.timeout), ": ", a.cause);
}

std::string Describe(const CloseAction& a) {
  return absl::StrCat("close", Within(a.timeout), ": ", a.end.reason);
}

std::string Describe(const TakeBackAction& a) {
  return absl::StrCat("take back the report of generation ", a.generation.number,
                      Within(a.timeout));
}

std::string Describe(const LeaveAction& a) {
  return absl::StrCat("leave", a.in_order ? " in order" : "", Within(a.timeout));
}

std::string Describe(const CancelRequestAction&) { return "cancel the request"; }

std::string Describe(const StartWorkersAction&) { return "start the workers"; }

std::string Describe(const SignalWorkersAction& a) {
  return absl::StrCat("send ", SignalName(a.signal), " to", LocalRanks(a.local_ranks));
}

std::string Describe(const StopWorkersAction& a) {
  const std::string when = !a.stop_at_step.has_value() ? " soon"
                           : *a.stop_at_step < 0       ? " at once"
                                                 : absl::StrCat(" after step ", *a.stop_at_step);
  return absl::StrCat("stop", LocalRanks(a.local_ranks), when, " or with ", SignalName(a.signal));
}

std::string Describe(const KillStraysAction&) { return "kill strays"; }

std::string Describe(const LogRestartAction& a) {
  return absl::StrCat(a.charged ? "log restart " : "log change of members after restart ",
                      a.restart, ": ", a.reason);
}

std::string Describe(const FallSilentAction&) { return "fall silent"; }

std::string Describe(const FinishAction& a) {
  return absl::StrCat("finish with code ", a.exit_code);
}

}  // namespace

std::string DebugString(const AgentAction& action) {
  return std::visit([](const auto& a) { return Describe(a); }, action);
}

}  // namespace ddp::elastic
