#include "elastic/agent/failed_workers.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace ddp::elastic {

namespace {

// Returns the time in whole seconds, the resolution of error files. Times in the same second are
// equal.
int64_t SecondOf(const WorkerFailure& failure) {
  return absl::ToUnixSeconds(failure.said_at == absl::InfinitePast() ? failure.wall_time
                                                                     : failure.said_at);
}

// Returns true when the error file of `one` says so.
bool CameBefore(const WorkerFailure& one, const WorkerFailure& two) {
  return !one.is_victim && one.said_at != absl::InfinitePast() && SecondOf(one) < SecondOf(two);
}

}  // namespace

bool FailedWorkers::CameFirst(const WorkerFailure& failure) const {
  if (const WorkerFailure* const own = FirstOwn(); own != nullptr) {
    return CameBefore(failure, *own);
  }
  const auto victim = std::find_if(failures_.begin(), failures_.end(),
                                   [](const WorkerFailure& other) { return !other.was_stopped; });
  return victim != failures_.end() && CameBefore(failure, *victim);
}

bool FailedWorkers::Complete(int local_rank, const ExitStatus& status) {
  const auto hung =
      std::find_if(failures_.begin(), failures_.end(),
                   [&](const WorkerFailure& failure) { return failure.local_rank == local_rank; });
  if (hung == failures_.end()) return false;
  hung->status = status;
  hung->error_file = status.error_file;
  return true;
}

FailedWorkers::Report FailedWorkers::TakeNextReport(const std::set<int>& unended) {
  if (reported_ == Reported::kNoMore) return {};
  const auto known = std::find_if(
      failures_.begin(), failures_.end(),
      [&](const WorkerFailure& failure) { return unended.contains(failure.local_rank); });
  if (reported_ == Reported::kCause) return TakeEarlierThanReported(known - failures_.begin());
  auto next = failures_.begin();
  if (reported_ == Reported::kVictim) {
    next =
        std::find_if(next, known, [](const WorkerFailure& failure) { return !failure.is_victim; });
  }
  if (next == known) return {};
  if (next->is_victim) {
    reported_ = Reported::kVictim;
    return {.failure = &*next};
  }
  for (auto other = failures_.begin(); other != known; ++other) {
    if (other->was_stopped == next->was_stopped && CameBefore(*other, *next)) next = other;
  }
  reported_ = Reported::kCause;
  cause_rank_ = next->rank;
  return {.failure = &*next};
}

// Considers the first `known` failures only.
FailedWorkers::Report FailedWorkers::TakeEarlierThanReported(size_t known) {
  const WorkerFailure* const own = FirstOwn();
  if (own == nullptr || static_cast<size_t>(own - failures_.data()) >= known) return {};
  const auto cause =
      std::find_if(failures_.begin(), failures_.end(),
                   [this](const WorkerFailure& failure) { return failure.rank == cause_rank_; });
  if (cause == failures_.end() || !CameBefore(*own, *cause)) return {};
  return {.failure = own, .instead_of = std::exchange(cause_rank_, own->rank)};
}

const WorkerFailure* FailedWorkers::CalledBy(const std::string& cause) const {
  const auto found =
      std::find_if(failures_.begin(), failures_.end(), [&](const WorkerFailure& failure) {
        return absl::StartsWith(cause, absl::StrCat("rank ", failure.rank, " "));
      });
  return found == failures_.end() ? nullptr : &*found;
}

const WorkerFailure* FailedWorkers::FirstOwn() const {
  const WorkerFailure* own = nullptr;
  for (const WorkerFailure& failure : failures_) {
    if (failure.is_victim || failure.was_stopped) continue;
    if (own == nullptr || CameBefore(failure, *own)) own = &failure;
  }
  return own;
}

std::vector<WorkerFailure> FailedWorkers::InOrder(const WorkerFailure* root) const {
  std::vector<WorkerFailure> ordered = failures_;
  auto others = ordered.begin();
  if (root != nullptr) {
    const auto first = others + (root - failures_.data());
    first->was_stopped = false;
    std::rotate(others, first, first + 1);
    ++others;
  }
  const auto behind = [](const WorkerFailure& failure) {
    return failure.was_stopped ? 2 : failure.is_victim ? 1 : 0;
  };
  std::stable_sort(others, ordered.end(),
                   [&](const auto& one, const auto& two) { return behind(one) < behind(two); });
  ordered.insert(ordered.end(), stopped_.begin(), stopped_.end());
  return ordered;
}

}  // namespace ddp::elastic
