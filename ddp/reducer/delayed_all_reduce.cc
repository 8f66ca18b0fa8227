#include "ddp/reducer/delayed_all_reduce.h"

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/process_group/model_group.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {
namespace {

void CheckParameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined() || !tensor.requires_grad()) {
      throw ConfigurationError(absl::StrCat("delay_all_reduce_named_params: ", name,
                                            " is not a parameter that requires a gradient"));
    }
    if (tensor.scalar_type() != parameters.front().second.scalar_type() ||
        tensor.device() != parameters.front().second.device()) {
      throw ConfigurationError(absl::StrCat("delay_all_reduce_named_params: ", name, " and ",
                                            parameters.front().first, " differ in type or device"));
    }
  }
}

std::vector<const void*> AddressesOf(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  std::vector<const void*> addresses;
  for (const auto& [name, tensor] : parameters) addresses.push_back(tensor.unsafeGetTensorImpl());
  return addresses;
}

[[noreturn]] void RefuseContext() {
  throw ConfigurationError(
      "delay_all_reduce_named_params is not supported in a distributed autograd context: use a "
      "plain backward, or leave the option out");
}

}  // namespace

DelayedAllReduce::DelayedAllReduce(std::vector<std::pair<std::string, at::Tensor>> parameters,
                                   const at::Tensor& trigger, std::shared_ptr<ModelGroup> group,
                                   When start)
    : parameters_(std::move(parameters)),
      trigger_(trigger),
      uses_(AddressesOf(parameters_)),
      group_(std::move(group)),
      start_(start),
      came_(parameters_.size(), 0) {
  CheckParameters(parameters_);
  PointGradients();
  hook_ = trigger_.register_hook([this](const at::Tensor&) { OnTrigger(); });
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.push_back(
        parameters_[i].second.register_hook([this, i](const at::Tensor&) { OnDelayed(i); }));
  }
}

DelayedAllReduce::~DelayedAllReduce() {
  trigger_.remove_hook(hook_);
  for (size_t i = 0; i < hooks_.size(); ++i) parameters_[i].second.remove_hook(hooks_[i]);
}

void DelayedAllReduce::PointGradients() {
  at::NoGradGuard no_grad;
  int64_t count = 0;
  for (const auto& [name, tensor] : parameters_) count += tensor.numel();
  flat_ = at::zeros({count}, parameters_.front().second.options().requires_grad(false));
  for (const auto& [name, tensor] : parameters_) at::Tensor(tensor).mutable_grad().reset();
  GatherGradients();
}

void DelayedAllReduce::GatherGradients() {
  at::NoGradGuard no_grad;
  const char* const flat = static_cast<const char*>(flat_.const_data_ptr());
  int64_t offset = 0;
  for (const auto& [name, tensor] : parameters_) {
    const int64_t begin = std::exchange(offset, offset + tensor.numel());
    at::Tensor& gradient = at::Tensor(tensor).mutable_grad();
    if (gradient.defined() && gradient.const_data_ptr() == flat + begin * flat_.element_size()) {
      continue;
    }
    at::Tensor part = flat_.narrow(0, begin, tensor.numel()).view(tensor.sizes());
    if (gradient.defined()) {
      part.copy_(gradient);
    } else {
      part.zero_();
    }
    gradient = part.variable_data();
  }
}

void DelayedAllReduce::EndForward(bool synchronize) {
  synchronize_ = synchronize;
  if (averaged_) {
    PointGradients();
  } else {
    GatherGradients();
  }
  averaged_ = false;
  came_.assign(parameters_.size(), 0);
}

void DelayedAllReduce::OnTrigger() {
  if (const auto events = GradientContext::OfHook()) {
    return events->Post(RefuseContext);
  }
  if (!synchronize_ || start_ == When::kAfterBuckets) return;
  if (pending_.tensor.defined()) FailSecondGradient("param_to_hook_all_reduce");
  Start(announce_ ? announce_() : group_->size());
  if (start_ == When::kAtTriggerAlone) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { Finish(); });
  }
}

// Runs before autograd adds the gradient to the flat tensor.
void DelayedAllReduce::OnDelayed(size_t parameter) {
  if (GradientContext::OfHook() != nullptr) return;
  const bool second = std::exchange(came_[parameter], 1) != 0;
  if (!pending_.tensor.defined()) return;
  const std::string& name = parameters_[parameter].first;
  if (second) FailSecondGradient(name);
  Fail(absl::StrCat(
      "the gradient of ", name, ", one of delay_all_reduce_named_params, came after the gradient ",
      "of param_to_hook_all_reduce, which starts the average of the delayed gradients: choose a ",
      "parameter whose gradient comes last"));
}

void DelayedAllReduce::FailSecondGradient(const std::string& name) {
  Fail(absl::StrCat(name,
                    " got a second gradient in one backward, when the delayed gradients were ",
                    "being averaged already"));
}

// Ranks with the same graph fail at the same gradient. A slower rank may come to a collective
// first: it throws the report.
void DelayedAllReduce::Fail(const std::string& problem) {
  const std::string message = absl::StrCat("rank ", group_->rank(), ": ", problem);
  group_->report_failure(message);
  throw ReductionError(message);
}

void DelayedAllReduce::Complete(int divisor) {
  if (GradientContext::running() != nullptr) RefuseContext();
  if (!pending_.tensor.defined()) Start(divisor);
  Finish();
}

bool DelayedAllReduce::shared() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (uses_.shared(i)) return true;
  }
  return false;
}

void DelayedAllReduce::Start(int divisor) {
  at::NoGradGuard no_grad;
  GatherGradients();
  average_ = shared() ? flat_.clone() : flat_;
  average_.mul_(1.0 / divisor);
  pending_ = group_->communicator().AllReduce(average_, {"the all-reduce of delayed gradients"});
}

void DelayedAllReduce::Finish() {
  at::NoGradGuard no_grad;
  group_->communicator().Wait(pending_);
  pending_ = {};
  if (!average_.is_same(flat_)) flat_.copy_(average_);
  average_.reset();
  averaged_ = true;
  came_.assign(parameters_.size(), 0);
}

void DelayedAllReduce::Shadow() {
  Communicator::Pending pending = group_->communicator().AllReduce(
      at::zeros_like(flat_), {"the all-reduce of delayed gradients"});
  group_->communicator().Wait(pending);
}

void DelayedAllReduce::Reset(std::shared_ptr<ModelGroup> group) {
  group_ = std::move(group);
  pending_ = {};
  average_.reset();
  averaged_ = false;
  came_.assign(parameters_.size(), 0);
  PointGradients();  // an abandoned all-reduce may still write to the old memory
}

}  // namespace ddp::internal
