#include "ddp/comm/reports/renewal.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {
namespace {

// Time that a rank may be missing before another rank asks whether it is alive.
constexpr absl::Duration kGrace = absl::Milliseconds(200);

// Returns the ranks of `missing` that have not answered the question.
std::vector<int> Silent(const ReportLog& log, int64_t question, const std::vector<int>& missing) {
  const std::vector<int> all = log.ReadAnswers(question).silent;
  std::vector<int> silent;
  std::set_intersection(missing.begin(), missing.end(), all.begin(), all.end(),
                        std::back_inserter(silent));
  return silent;
}

}  // namespace

std::optional<GroupFailure> MeetForRenewal(const std::shared_ptr<GroupStore>& store, ReportLog& log,
                                           const Membership& next, absl::Duration timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  StoreMeeting meeting(store, ReportLog::RenewalName(next.incarnation), next);
  // An earlier call may have arrived before the store failed. If the store failed between the two
  // steps of Arrive(), the loop below finds that no rank is missing.
  if (!meeting.HasArrived()) meeting.Arrive("");
  std::optional<int64_t> question;
  int64_t since_ns = MonotonicNanoseconds();
  std::optional<std::string> verdict = meeting.AwaitVerdict(std::min(kGrace, timeout));
  while (!verdict.has_value()) {
    const std::vector<int> missing = meeting.Missing();
    std::vector<int> silent;
    if (question.has_value()) silent = Silent(log, *question, missing);
    if (missing.empty()) {
      verdict = meeting.Decide(StoreMeeting::kMet);  // the last rank is about to, or died
    } else if (!silent.empty()) {
      verdict = meeting.Decide(ReportLog::GoneVerdict(
          {.rank = silent.front(),
           .reason = absl::StrCat("no sign of life from ", RankList(silent), " for ",
                                  absl::FormatDuration(ReportLog::kAnswerTimeout),
                                  ": the process has died, or the host is out of reach")}));
    } else if (clock.Now() >= deadline) {
      verdict = meeting.Decide(ReportLog::GoneVerdict(
          {.rank = missing.front(),
           .reason = absl::StrCat(RankList(missing), " did not come back within ",
                                  absl::FormatDuration(timeout),
                                  " after a failure, although the process is alive")}));
    } else {
      // Does not ask when another rank has: that one tells all. Should it die, this one asks next.
      question =
          log.AskWhere(next.incarnation - 1, std::exchange(since_ns, MonotonicNanoseconds()));
      verdict = meeting.AwaitVerdict(ReportLog::kAnswerTimeout);
    }
  }
  return ReportLog::ParseGoneVerdict(*verdict);
}

}  // namespace ddp::internal
