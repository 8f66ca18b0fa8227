#include "elastic/agent/node_failures.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::elastic {

bool NodeFailures::Complete(int local_rank, const ExitStatus& status) {
  const auto hung =
      std::find_if(failures_.begin(), failures_.end(),
                   [&](const WorkerFailure& failure) { return failure.local_rank == local_rank; });
  if (hung == failures_.end()) return false;
  hung->status = status;
  hung->error_file = status.error_file;
  return true;
}

const WorkerFailure* NodeFailures::TakeNextToTell(const std::set<int>& unended) {
  if (told_ == Told::kCause) return nullptr;
  const auto known = std::find_if(
      failures_.begin(), failures_.end(),
      [&](const WorkerFailure& failure) { return unended.contains(failure.local_rank); });
  auto next = failures_.begin();
  if (told_ == Told::kVictim) {
    next =
        std::find_if(next, known, [](const WorkerFailure& failure) { return !failure.is_victim; });
  }
  if (next == known) return nullptr;
  told_ = next->is_victim ? Told::kVictim : Told::kCause;
  return &*next;
}

const WorkerFailure* NodeFailures::CalledBy(const std::string& cause) const {
  const auto found =
      std::find_if(failures_.begin(), failures_.end(), [&](const WorkerFailure& failure) {
        return absl::StartsWith(cause, absl::StrCat("rank ", failure.rank, " "));
      });
  return found == failures_.end() ? nullptr : &*found;
}

const WorkerFailure* NodeFailures::FirstOwn() const {
  const auto own = std::find_if(
      failures_.begin(), failures_.end(),
      [](const WorkerFailure& failure) { return !failure.is_victim && !failure.was_stopped; });
  return own == failures_.end() ? nullptr : &*own;
}

std::vector<WorkerFailure> NodeFailures::InOrder(const WorkerFailure* root) const {
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
