#include "ddp/comm/renewal.h"

#include <algorithm>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/store_meeting.h"

namespace ddp {
namespace {

// How long a rank may be absent before anyone asks about it.
constexpr absl::Duration kGrace = absl::Milliseconds(200);

// How long a process has to answer that it is alive.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(3);

constexpr char kPings[] = "pings";  // counts the pings of the group's whole life

// Asks the missing ranks whether they are alive, unless another rank has asked since `last`.
// Returns the number of the question.
int64_t Ask(c10d::Store& store, FailureNotice& notice, const std::vector<int>& missing,
            int64_t last) {
  const int64_t newest = store.add(kPings, 0);
  if (newest != last) return newest;
  const int64_t mine = store.add(kPings, 1);
  if (mine == last + 1) notice.Ping(mine, missing);
  return mine;
}

std::vector<int> Silent(c10d::Store& store, const std::vector<int>& missing, int64_t question) {
  std::vector<int> silent;
  for (const int rank : missing) {
    if (!store.check({FailureNotice::AliveKey(question, rank)})) silent.push_back(rank);
  }
  return silent;
}

}  // namespace

std::optional<FailureNotice::Failure> MeetForRenewal(const c10::intrusive_ptr<c10d::Store>& store,
                                                     FailureNotice& notice,
                                                     const RenewalOptions& options) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + options.timeout;
  StoreMeeting meeting(store, FailureNotice::RenewalName(options.incarnation), options.rank,
                       options.size);
  meeting.Arrive("");
  int64_t question = store->add(kPings, 0);
  bool asked = false;
  std::optional<std::string> verdict = meeting.AwaitVerdict(std::min(kGrace, options.timeout));
  while (!verdict.has_value()) {
    const std::vector<int> missing = meeting.Missing();
    const std::vector<int> silent = asked ? Silent(*store, missing, question) : std::vector<int>();
    if (missing.empty()) {
      verdict = meeting.Decide(StoreMeeting::kMet);  // the last to come had no time to say so
    } else if (!silent.empty()) {
      verdict = meeting.Decide(FailureNotice::GoneVerdict(
          {.rank = silent.front(),
           .reason = absl::StrCat("no sign of life from ", RankList(silent), " for ",
                                  absl::FormatDuration(kAnswerTimeout),
                                  ": the process has died, or the host is out of reach")}));
    } else if (clock.Now() >= deadline) {
      verdict = meeting.Decide(FailureNotice::GoneVerdict(
          {.rank = missing.front(),
           .reason = absl::StrCat(RankList(missing), " did not come back within ",
                                  absl::FormatDuration(options.timeout),
                                  " after a failure, although the process is alive")}));
    } else {
      question = Ask(*store, notice, missing, question);
      asked = true;
      verdict = meeting.AwaitVerdict(kAnswerTimeout);
    }
  }
  return FailureNotice::ParseGoneVerdict(*verdict);
}

}  // namespace ddp
