#include "ddp/comm/meeting/attempt_name.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

// How long rank 0 waits for a confirmation before it looks for another number: at first, and at
// most.
constexpr absl::Duration kFirstLook = absl::Milliseconds(20);
constexpr absl::Duration kLongestLook = absl::Seconds(1);

std::string RandomName() {
  std::random_device random;
  std::string name;
  for (int word = 0; word < 4; ++word) absl::StrAppend(&name, absl::Hex(random(), absl::kZeroPad8));
  return name;
}

std::string NumberKey(int rank) { return absl::StrCat("attempt/number/", rank); }
std::string AnswerKey(const std::string& number) { return absl::StrCat("attempt/answer/", number); }
std::string ConfirmedKey(const std::string& name, int rank) {
  return absl::StrCat("attempt/confirmed/", name, "/", rank);
}

absl::Status Missing(int rank, int missing, absl::Duration timeout) {
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", rank, ": rank ", missing, " has not come within ", absl::FormatDuration(timeout)));
}

// Waits until `rank` has confirmed `name`. Returns false at the deadline.
bool Answer(GroupStore& store, int rank, const std::string& name, absl::Time deadline) {
  const MonotonicClock clock;
  const auto left = [&] { return std::max(deadline - clock.Now(), absl::ZeroDuration()); };
  if (!store.Wait(NumberKey(rank), left())) return false;
  std::string answered;
  for (absl::Duration look = kFirstLook;; look = std::min(2 * look, kLongestLook)) {
    const std::string number = store.Get(NumberKey(rank));
    if (number != answered) store.Set(AnswerKey(number), name);
    if (!answered.empty() && number != answered) store.Delete(AnswerKey(answered));
    answered = number;
    if (store.Wait(ConfirmedKey(name, rank), std::min(look, left()))) break;
    if (left() == absl::ZeroDuration()) return false;
  }
  store.Delete(NumberKey(rank));
  store.Delete(AnswerKey(answered));
  store.Delete(ConfirmedKey(name, rank));
  return true;
}

}  // namespace

absl::StatusOr<std::string> AgreeOnAttempt(GroupStore& store, int rank, int size,
                                           absl::Duration timeout) {
  const std::string mine = RandomName();
  if (rank == 0) {
    const absl::Time deadline = MonotonicClock().Now() + timeout;
    for (int other = 1; other < size; ++other) {
      if (!Answer(store, other, mine, deadline)) return Missing(rank, other, timeout);
    }
    return mine;
  }
  store.Set(NumberKey(rank), mine);
  if (!store.Wait(AnswerKey(mine), timeout)) return Missing(rank, 0, timeout);
  const std::string name = store.Get(AnswerKey(mine));
  store.Set(ConfirmedKey(name, rank), "");
  return name;
}

}  // namespace ddp::internal
