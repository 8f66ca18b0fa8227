#include "ddp/reducer/pass/forward_history.h"

#include <algorithm>
#include <cstddef>

namespace ddp::internal {
namespace {

// Forwards that are remembered for backwards that pass none of their outputs.
constexpr size_t kRecentForwards = 32;

}  // namespace

void ForwardHistory::Add(const ForwardPtr& forward, bool seen) {
  recent_.push_back(forward);
  if (recent_.size() > kRecentForwards) recent_.pop_front();
  unseen_ = forward->synchronized && !seen ? forward : nullptr;
}

const ForwardPtr* ForwardHistory::Find(uint64_t thread, uint64_t number) const {
  for (auto forward = recent_.rbegin(); forward != recent_.rend(); ++forward) {
    if ((*forward)->Created(thread, number)) return &*forward;
  }
  return nullptr;
}

ForwardHistory::Origin ForwardHistory::FindOrigin(const BackwardView& backward) {
  if (backward.watched) {
    if (backward.forwards.empty()) return Origin::kLocal;
    return AnyAwaits(backward.forwards) ? Origin::kReduce : Origin::kReduced;
  }
  if (backward.task == searched_task_) return searched_origin_;
  searched_task_ = backward.task;
  const Origin origin = Search(backward);
  // The first gradient of a bare backward is reported, and no other.
  searched_origin_ = origin == Origin::kBare ? Origin::kLocal : origin;
  return origin;
}

// A loss that the module kept in a member passes a forward and none of its outputs. A penalty on a
// parameter comes before the output.
ForwardHistory::Origin ForwardHistory::Search(const BackwardView& backward) {
  awaiting_.clear();
  bool local = false;
  bool reduced = false;
  const auto take = [&](const ForwardPtr& forward) {
    const auto& outputs = forward->outputs;
    const bool all_reduced =
        !by_output_ ||
        std::all_of(outputs.begin(), outputs.end(), [](ForwardRecord::Output output) {
          return output == ForwardRecord::Output::kReduced;
        });
    if (!forward->synchronized) {
      local = true;
    } else if (forward->reduced && all_reduced) {
      reduced = true;
    } else if (std::find(awaiting_.begin(), awaiting_.end(), forward) == awaiting_.end()) {
      awaiting_.push_back(forward);
    }
  };
  for (const ForwardPtr& forward : backward.forwards) take(forward);
  if (awaiting_.empty() && !reduced && !local && unseen_ && !unseen_->reduced) take(unseen_);
  if (!awaiting_.empty()) return Origin::kReduce;
  if (reduced) return Origin::kReduced;
  return local ? Origin::kLocal : Origin::kBare;
}

bool ForwardHistory::AwaitsReduction(const ForwardRecord& forward) const {
  if (!by_output_) return !forward.reduced;
  return std::find(forward.outputs.begin(), forward.outputs.end(),
                   ForwardRecord::Output::kPassed) != forward.outputs.end();
}

bool ForwardHistory::AnyAwaits(const std::vector<ForwardPtr>& forwards) const {
  return std::any_of(forwards.begin(), forwards.end(),
                     [this](const ForwardPtr& forward) { return AwaitsReduction(*forward); });
}

bool ForwardHistory::HasOutstanding() const {
  return std::any_of(outstanding_.begin(), outstanding_.end(), [](const auto& weak) {
    const ForwardPtr forward = weak.lock();
    return forward && !forward->reduced;
  });
}

void ForwardHistory::AddToPass(const std::vector<ForwardPtr>& forwards) {
  in_pass_.insert(in_pass_.end(), forwards.begin(), forwards.end());
}

void ForwardHistory::AddWithoutBackward(const ForwardPtr& forward) {
  in_pass_.push_back(forward);
  std::fill(forward->outputs.begin(), forward->outputs.end(), ForwardRecord::Output::kPassed);
}

void ForwardHistory::FinishPass() {
  for (const ForwardPtr& forward : in_pass_) {
    forward->reduced = true;
    std::replace(forward->outputs.begin(), forward->outputs.end(), ForwardRecord::Output::kPassed,
                 ForwardRecord::Output::kReduced);
  }
  in_pass_.clear();
  // A forward before the newest reduced one is taken to have no backward.
  size_t keep_from = 0;
  for (size_t i = 0; i < outstanding_.size(); ++i) {
    const ForwardPtr forward = outstanding_[i].lock();
    if (!forward || forward->reduced) keep_from = i + 1;
  }
  outstanding_.erase(outstanding_.begin(),
                     outstanding_.begin() + static_cast<std::ptrdiff_t>(keep_from));
}

std::vector<ForwardPtr> ForwardHistory::Unpassed() const {
  std::vector<ForwardPtr> unpassed;
  for (const ForwardPtr& forward : recent_) {
    const bool counts = forward->synchronized && forward->training;
    if (!counts || forward->reduced || forward->skipped) continue;
    const auto& outputs = forward->outputs;
    if (std::all_of(outputs.begin(), outputs.end(), [](ForwardRecord::Output output) {
          return output == ForwardRecord::Output::kFresh;
        })) {
      unpassed.push_back(forward);
    }
  }
  return unpassed;
}

void ForwardHistory::Clear() {
  recent_.clear();
  unseen_.reset();
  outstanding_.clear();
  in_pass_.clear();
  awaiting_.clear();
}

}  // namespace ddp::internal
