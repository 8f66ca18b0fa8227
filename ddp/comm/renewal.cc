#include "ddp/comm/renewal.h"

#include <algorithm>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/store_meeting.h"

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
  Questions(c10d::Store& store, FailureNotice& notice, int64_t incarnation)
      : store_(store), notice_(notice), incarnation_(incarnation) {}

  // Returns the number of the newest question, or 0. Its answers may be old, so a rank that came
  // late may need another question to see that a process is gone.
  int64_t Newest() { return store_.add(Key("count"), 0); }

  void Ask(int64_t number, const std::vector<int>& missing) {
    if (store_.add(Key(absl::StrCat("claim/", number)), 1) != 1) return;
    notice_.Ping(incarnation_, number, missing);
    store_.set(Key(absl::StrCat("asked/", number)), std::string("1"));
    store_.add(Key("count"), 1);
  }

  // Returns the ranks that have not answered. If the rank that claimed the question died before it
  // asked, this rank asks, and the result is empty: the time for an answer begins now.
  std::vector<int> Silent(int64_t number, const std::vector<int>& missing) {
    std::vector<int> silent;
    if (!store_.check({Key(absl::StrCat("asked/", number))})) {
      notice_.Ping(incarnation_, number, missing);
      store_.set(Key(absl::StrCat("asked/", number)), std::string("1"));
      return silent;
    }
    for (const int rank : missing) {
      if (!store_.check({FailureNotice::AliveKey(incarnation_, number, rank)})) {
        silent.push_back(rank);
      }
    }
    return silent;
  }

 private:
  std::string Key(const std::string& name) const {
    return absl::StrCat("question/", incarnation_, "/", name);
  }

  c10d::Store& store_;
  FailureNotice& notice_;
  const int64_t incarnation_;
};

}  // namespace

std::optional<FailureNotice::Failure> MeetForRenewal(const c10::intrusive_ptr<c10d::Store>& store,
                                                     FailureNotice& notice,
                                                     const RenewalOptions& options) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + options.timeout;
  StoreMeeting meeting(store, FailureNotice::RenewalName(options.incarnation), options.rank,
                       options.size);
  // An earlier call may have arrived before the store failed. If the store failed between the two
  // steps of Arrive(), the loop below finds that no rank is missing.
  if (!meeting.HasArrived()) meeting.Arrive("");
  Questions questions(*store, notice, options.incarnation);
  int64_t question = 0;  // the last one that was asked, or 0
  std::optional<std::string> verdict = meeting.AwaitVerdict(std::min(kGrace, options.timeout));
  while (!verdict.has_value()) {
    const std::vector<int> missing = meeting.Missing();
    std::vector<int> silent;
    if (question > 0) silent = questions.Silent(question, missing);
    if (missing.empty()) {
      verdict = meeting.Decide(StoreMeeting::kMet);  // the last rank is about to, or died
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
      const int64_t newest = questions.Newest();
      if (newest > question) {
        question = newest;
      } else {
        questions.Ask(++question, missing);
      }
      verdict = meeting.AwaitVerdict(kAnswerTimeout);
    }
  }
  return FailureNotice::ParseGoneVerdict(*verdict);
}

}  // namespace ddp::internal
