#include "elastic/agent/agent_events.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::elastic {
namespace {

std::string LocalRanks(const std::vector<int>& local_ranks) {
  return absl::StrCat(" local ranks ", absl::StrJoin(local_ranks, " "));
}

// Returns the request's name, and its further content.
std::pair<std::string, std::string> Describe(const JoinRequest&) { return {"join", ""}; }

std::pair<std::string, std::string> Describe(const FailureRequest& r) {
  return {absl::StrCat("report rank ", r.rank, r.is_victim ? " as a victim" : "",
                       r.is_unprompted ? " unprompted" : "",
                       r.instead_of >= 0 ? absl::StrCat(" instead of rank ", r.instead_of) : ""),
          r.cause};
}

std::pair<std::string, std::string> Describe(const CompleteRequest&) { return {"complete", ""}; }

std::pair<std::string, std::string> Describe(const DrainRequest& r) { return {"drain", r.cause}; }

std::pair<std::string, std::string> Describe(const TakeBackRequest& r) {
  return {absl::StrCat("take back the report of generation ", r.generation.number), ""};
}

std::pair<std::string, std::string> Describe(const LeaveRequest& r) {
  return {r.in_order ? "leave in order" : "leave", ""};
}

std::pair<std::string, std::string> Describe(const CloseRequest& r) {
  return {"close", r.end.reason};
}

std::string Describe(const RequestAction& a) {
  const auto [name, content] = std::visit([](const auto& r) { return Describe(r); }, a.request);
  return absl::StrCat(name, " within ", absl::FormatDuration(a.timeout),
                      content.empty() ? "" : ": ", content);
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
