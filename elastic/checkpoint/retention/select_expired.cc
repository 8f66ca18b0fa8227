#include "elastic/checkpoint/retention/select_expired.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

// Returns the IDs of the best K.
std::set<CheckpointId> Best(const RetentionPolicy& policy,
                            const std::vector<FinishedCheckpoint>& newest_first) {
  std::vector<FinishedCheckpoint> ranked;
  for (const FinishedCheckpoint& checkpoint : newest_first) {
    if (checkpoint.metric.has_value() && !std::isnan(*checkpoint.metric)) {
      ranked.push_back(checkpoint);
    }
  }
  const bool lowest = policy.best_is == RetentionPolicy::Best::kLowest;
  std::stable_sort(ranked.begin(), ranked.end(),
                   [lowest](const FinishedCheckpoint& a, const FinishedCheckpoint& b) {
                     return lowest ? *a.metric < *b.metric : *a.metric > *b.metric;
                   });
  std::set<CheckpointId> best;
  for (const FinishedCheckpoint& checkpoint : ranked) {
    if (static_cast<int64_t>(best.size()) >= policy.keep_best) break;
    best.insert(checkpoint.id);
  }
  return best;
}

std::string ReasonOfKeeps(const RetentionPolicy& policy) {
  std::string reason = absl::StrCat("keep_last is ", policy.keep_last);
  if (policy.keep_every > 0) absl::StrAppend(&reason, ", keep_every is ", policy.keep_every);
  if (policy.keep_best > 0) absl::StrAppend(&reason, ", keep_best is ", policy.keep_best);
  return reason;
}

// Removes elements of `kept`, oldest first, until the rest fits into max_bytes: first those that
// are not in `best`, then the others. The first element of `kept` is the newest, and stays.
void ApplyBudget(const RetentionPolicy& policy, const std::set<CheckpointId>& best,
                 std::vector<FinishedCheckpoint>& kept, std::vector<ExpiredCheckpoint>& expired) {
  // A double has room for the sum of any sizes.
  double bytes = 0;
  for (const FinishedCheckpoint& checkpoint : kept) bytes += static_cast<double>(checkpoint.bytes);
  for (const bool take_best : {false, true}) {
    for (size_t i = kept.size(); i-- > 1;) {
      if (bytes <= static_cast<double>(policy.max_bytes)) return;
      if (best.contains(kept[i].id) != take_best) continue;
      bytes -= static_cast<double>(kept[i].bytes);
      expired.push_back({kept[i].id, absl::StrCat("max_bytes is ", policy.max_bytes)});
      kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

}  // namespace

std::vector<ExpiredCheckpoint> SelectExpired(const RetentionPolicy& policy,
                                             const std::vector<FinishedCheckpoint>& finished,
                                             const CheckpointId& newest) {
  std::vector<FinishedCheckpoint> newest_first;
  for (const FinishedCheckpoint& checkpoint : finished) {
    if (checkpoint.id <= newest) newest_first.push_back(checkpoint);
  }
  std::sort(newest_first.begin(), newest_first.end(),
            [](const FinishedCheckpoint& a, const FinishedCheckpoint& b) { return a.id > b.id; });
  if (newest_first.empty() || newest_first.front().id != newest) return {};

  const std::set<CheckpointId> best = Best(policy, newest_first);
  std::vector<FinishedCheckpoint> kept;
  std::vector<ExpiredCheckpoint> expired;
  std::optional<int64_t> newer_step;  // of the checkpoint before in the order
  for (size_t i = 0; i < newest_first.size(); ++i) {
    const FinishedCheckpoint& checkpoint = newest_first[i];
    const bool is_milestone = policy.keep_every > 0 &&
                              checkpoint.id.step % policy.keep_every == 0 &&
                              newer_step != checkpoint.id.step;
    newer_step = checkpoint.id.step;
    if (i == 0 || static_cast<int64_t>(i) < policy.keep_last || is_milestone ||
        best.contains(checkpoint.id)) {
      kept.push_back(checkpoint);
    } else {
      expired.push_back({checkpoint.id, ReasonOfKeeps(policy)});
    }
  }
  if (policy.max_bytes > 0) ApplyBudget(policy, best, kept, expired);
  std::sort(expired.begin(), expired.end(),
            [](const ExpiredCheckpoint& a, const ExpiredCheckpoint& b) { return a.id < b.id; });
  return expired;
}

}  // namespace ddp::elastic
