#include "ddp/comm/reports/renewal.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {
namespace {

// Time that a rank may be missing before another rank asks whether it is alive.
constexpr absl::Duration kGrace = absl::Milliseconds(200);

// Time within which a living process answers.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(3);

// The questions of one renewal: the ranks that have come ask the missing ranks whether they are
// alive. Questions are numbered from 1, and one rank asks each of them for all.
class Questions {
 public:
  Questions(GroupStore& store, ReportLog& log, int64_t incarnation)
      : store_(store), log_(log), incarnation_(incarnation) {}

  // Returns the number of the newest question, or 0. Its answers may be old, so a rank that came
  // late may need another question to see that a process is gone.
  int64_t Newest() { return store_.Add(Key("count"), 0); }

  void Ask(int64_t number, const std::vector<int>& missing) {
    if (store_.Add(Key(absl::StrCat("claim/", number)), 1) != 1) return;
    log_.Ping(incarnation_, number, missing);
    store_.Set(Key(absl::StrCat("asked/", number)), "1");
    store_.Add(Key("count"), 1);
  }

  // Returns the ranks that have not answered. If the rank that claimed the question died before it
  // asked, this rank asks, and the result is empty: the time for an answer begins now.
  std::vector<int> Silent(int64_t number, const std::vector<int>& missing) {
    std::vector<int> silent;
    if (!store_.Has({Key(absl::StrCat("asked/", number))})) {
      log_.Ping(incarnation_, number, missing);
      store_.Set(Key(absl::StrCat("asked/", number)), "1");
      return silent;
    }
    for (const int rank : missing) {
      if (!store_.Has({ReportLog::AliveKey(incarnation_, number, rank)})) {
        silent.push_back(rank);
      }
    }
    return silent;
  }

 private:
  std::string Key(const std::string& name) const {
    return absl::StrCat("question/", incarnation_, "/", name);
  }

  GroupStore& store_;
  ReportLog& log_;
  const int64_t incarnation_;
};

}  // namespace

std::optional<GroupFailure> MeetForRenewal(const std::shared_ptr<GroupStore>& store, ReportLog& log,
                                           const Membership& next, absl::Duration timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  StoreMeeting meeting(store, ReportLog::RenewalName(next.incarnation), next);
  // An earlier call may have arrived before the store failed. If the store failed between the two
  // steps of Arrive(), the loop below finds that no rank is missing.
  if (!meeting.HasArrived()) meeting.Arrive("");
  Questions questions(*store, log, next.incarnation);
  int64_t question = 0;  // the last one that was asked, or 0
  std::optional<std::string> verdict = meeting.AwaitVerdict(std::min(kGrace, timeout));
  while (!verdict.has_value()) {
    const std::vector<int> missing = meeting.Missing();
    std::vector<int> silent;
    if (question > 0) silent = questions.Silent(question, missing);
    if (missing.empty()) {
      verdict = meeting.Decide(StoreMeeting::kMet);  // the last rank is about to, or died
    } else if (!silent.empty()) {
      verdict = meeting.Decide(ReportLog::GoneVerdict(
          {.rank = silent.front(),
           .reason = absl::StrCat("no sign of life from ", RankList(silent), " for ",
                                  absl::FormatDuration(kAnswerTimeout),
                                  ": the process has died, or the host is out of reach")}));
    } else if (clock.Now() >= deadline) {
      verdict = meeting.Decide(ReportLog::GoneVerdict(
          {.rank = missing.front(),
           .reason = absl::StrCat(RankList(missing), " did not come back within ",
                                  absl::FormatDuration(timeout),
                                  " after a failure, although the process is alive")}));
    } else {
      const int64_t newest = questions.Newest();
      if (newest > question) {
        question = newest;
      } else {
        questions.Ask(++question, missing);
      }
      verdict = meeting.AwaitVerdict(kAnswerTimeout);
    }
  }
  return ReportLog::ParseGoneVerdict(*verdict);
}

}  // namespace ddp::internal
