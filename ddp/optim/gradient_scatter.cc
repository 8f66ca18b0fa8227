#include "ddp/optim/gradient_scatter.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/any.h>
#include <ATen/ops/empty.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/optim/sharded_parameters.h"
#include "ddp/process_group.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

GradientScatter::GradientScatter(std::shared_ptr<ProcessGroup> group, std::function<int()> divisor)
    : group_(std::move(group)), divisor_(std::move(divisor)) {}

void GradientScatter::SetPlan(const ShardedParameters& parameters) {
  const size_t watched = watched_.size();
  watched_ = parameters.tensors();
  must_be_clear_.resize(watched_.size());
  buckets_.clear();
  for (const ShardPlan::Bucket& bucket : parameters.plan().buckets()) {
    if (bucket.owner >= 0) continue;
    Bucket taken{.numbers = bucket.parameters, .part = bucket.part};
    for (const int number : bucket.parameters) {
      taken.parameters.push_back(watched_[number].unsafeGetTensorImpl());
    }
    buckets_.push_back(std::move(taken));
  }
  for (size_t i = watched; i < watched_.size(); ++i) {
    if (!watched_[i].requires_grad()) continue;
    // Runs before the gradient is added to .grad. The parameter may live longer than this object.
    watched_[i].register_hook(
        [weak = weak_from_this(), number = static_cast<int>(i)](const at::Tensor&) {
          if (const auto scatter = weak.lock()) scatter->CheckGradient(number);
        });
  }
}

void GradientScatter::CheckGradient(int parameter) {
  if (stopped_) return;
  if (const auto events = GradientContext::OfHook()) {
    events->Post([] {
      throw ConfigurationError(
          "scatter_gradients of a ZeroRedundancyOptimizer is not supported in a distributed "
          "autograd context: switch it off, or use a plain backward");
    });
    return;
  }
  if (!must_be_clear_[parameter]) return;
  const at::Tensor& gradient = watched_[parameter].grad();
  if (gradient.defined() && at::any(gradient).item<bool>()) {
    const std::string message = absl::StrCat(
        "rank ", group_->rank(), ": a backward adds to the gradient of parameter ", parameter,
        " of a ZeroRedundancyOptimizer, and an earlier backward has scattered that gradient: call "
        "zero_grad() between two synchronized backwards. To accumulate gradients, run every "
        "backward except the last under no_sync(), or switch scatter_gradients off");
    group_->report_failure(message);  // a peer may not have come as far
    throw ReductionError(message);
  }
  must_be_clear_[parameter] = false;
}

TensorFuture GradientScatter::Hook(const std::shared_ptr<GradientScatter>& scatter,
                                   GradBucket& bucket) {
  return scatter->Reduce(bucket);
}

const GradientScatter::Bucket* GradientScatter::Find(const GradBucket& bucket) const {
  const std::vector<at::Tensor>& parameters = bucket.parameters();
  for (const Bucket& candidate : buckets_) {
    const bool equal =
        std::equal(candidate.parameters.begin(), candidate.parameters.end(), parameters.begin(),
                   parameters.end(), [](const c10::TensorImpl* mine, const at::Tensor& theirs) {
                     return mine == theirs.unsafeGetTensorImpl();
                   });
    if (equal) return &candidate;
  }
  return nullptr;
}

TensorFuture GradientScatter::Reduce(GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  const Bucket* const plan = Find(bucket);
  DivideByRanks(bucket.buffer(), under_join_ ? divisor_() : group_->size());
  const bool scatter = !under_join_ && !stopped_ && plan != nullptr;
  if (!scatter) return group_->all_reduce_async(bucket.buffer());
  for (const int number : plan->numbers) must_be_clear_[number] = true;
  return Scatter(*plan, bucket.buffer());
}

TensorFuture GradientScatter::Scatter(const Bucket& plan, const at::Tensor& buffer) {
  const int64_t all = plan.part * group_->size();
  at::Tensor input = buffer;
  if (all != buffer.numel()) {
    input = at::empty({all}, buffer.options());
    input.narrow(0, 0, buffer.numel()).copy_(buffer);
    input.narrow(0, buffer.numel(), all - buffer.numel()).zero_();
  }
  const at::Tensor output = at::empty({plan.part}, buffer.options());
  const int64_t begin = std::min(plan.part * group_->rank(), buffer.numel());
  const int64_t count = std::min(plan.part, buffer.numel() - begin);
  return group_->reduce_scatter_async(output, input)
      .then([buffer, output, begin, count](c10::ivalue::Future&) -> c10::IValue {
        const at::NoGradGuard no_grad;  // runs on another thread
        buffer.narrow(0, begin, count).copy_(output.narrow(0, 0, count));
        return buffer;
      });
}

std::vector<std::vector<std::string>> ScatterLayout(const ShardedParameters& parameters,
                                                    const std::vector<std::string>& names,
                                                    const std::vector<at::Tensor>& tensors,
                                                    const std::vector<bool>& sparse) {
  std::unordered_map<const c10::TensorImpl*, size_t> unplaced;  // numbers in the model
  for (size_t i = 0; i < tensors.size(); ++i) unplaced[tensors[i].unsafeGetTensorImpl()] = i;
  std::vector<std::vector<std::string>> even;
  std::vector<std::vector<std::string>> others;
  for (const ShardPlan::Bucket& bucket : parameters.plan().buckets()) {
    std::vector<std::string> members;
    for (const int number : bucket.parameters) {
      const auto found = unplaced.find(parameters.tensors()[number].unsafeGetTensorImpl());
      if (found == unplaced.end() || sparse[found->second]) continue;
      members.push_back(names[found->second]);
      unplaced.erase(found);
    }
    if (!members.empty()) (bucket.owner < 0 ? even : others).push_back(std::move(members));
  }
  std::map<std::string, std::vector<std::string>> rest;  // by kind
  for (size_t i = tensors.size(); i-- > 0;) {
    if (!unplaced.contains(tensors[i].unsafeGetTensorImpl())) continue;
    if (sparse[i]) {
      others.push_back({names[i]});
    } else {
      rest[absl::StrCat(toString(tensors[i].scalar_type()), tensors[i].device().str())].push_back(
          names[i]);
    }
  }
  for (auto& [kind, members] : rest) others.push_back(std::move(members));
  even.insert(even.end(), others.begin(), others.end());
  return even;
}

}  // namespace ddp::internal
