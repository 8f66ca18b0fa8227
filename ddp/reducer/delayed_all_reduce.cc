#include "ddp/reducer/delayed_all_reduce.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/reducer/reducer_group.h"

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

[[noreturn]] void RefuseContext() {
  throw ConfigurationError(
      "delay_all_reduce_named_params is not supported in a distributed autograd context: use a "
      "plain backward, or leave the option out");
}

}  // namespace

DelayedAllReduce::DelayedAllReduce(std::vector<std::pair<std::string, at::Tensor>> parameters,
                                   const at::Tensor& trigger, std::shared_ptr<ReducerGroup> group,
                                   When start)
    : parameters_(std::move(parameters)),
      trigger_(trigger),
      group_(std::move(group)),
      start_(start) {
  CheckParameters(parameters_);
  PointGradients();
  hook_ = trigger_.register_hook([this](const at::Tensor&) { OnTrigger(); });
}

DelayedAllReduce::~DelayedAllReduce() { trigger_.remove_hook(hook_); }

void DelayedAllReduce::PointGradients() {
  at::NoGradGuard no_grad;
  int64_t count = 0;
  for (const auto& [name, tensor] : parameters_) count += tensor.numel();
  flat_ = at::zeros({count}, parameters_.front().second.options().requires_grad(false));
  int64_t offset = 0;
  for (const auto& [name, tensor] : parameters_) {
    const at::Tensor part = flat_.narrow(0, offset, tensor.numel()).view(tensor.sizes());
    offset += tensor.numel();
    at::Tensor parameter = tensor;
    parameter.mutable_grad() = part.variable_data();
  }
}

void DelayedAllReduce::EndForward(bool synchronize) {
  synchronize_ = synchronize;
  bool taken_away = false;  // by zero_grad()
  for (const auto& [name, tensor] : parameters_) taken_away |= !tensor.grad().defined();
  if (averaged_ || taken_away) PointGradients();
  averaged_ = false;
}

void DelayedAllReduce::OnTrigger() {
  if (const auto events = GradientContext::OfHook()) {
    return events->Post(RefuseContext);
  }
  if (!synchronize_ || start_ == When::kAfterBuckets) return;
  if (pending_.tensor.defined()) {
    throw ReductionError(absl::StrCat(
        "rank ", group_->rank(),
        ": param_to_hook_all_reduce got a second gradient in one backward, when the delayed "
        "gradients were being averaged already"));
  }
  Start(announce_ ? announce_() : group_->size());
  if (start_ == When::kAtTriggerAlone) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { Finish(); });
  }
}

void DelayedAllReduce::Complete(int divisor) {
  if (GradientContext::running() != nullptr) RefuseContext();
  if (!pending_.tensor.defined()) Start(divisor);
  Finish();
}

void DelayedAllReduce::Start(int divisor) {
  at::NoGradGuard no_grad;
  flat_.mul_(1.0 / divisor);
  pending_ = group_->communicator().AllReduce(flat_, {"the all-reduce of delayed gradients"});
}

void DelayedAllReduce::Finish() {
  group_->communicator().Wait(pending_);
  pending_ = {};
  averaged_ = true;
}

void DelayedAllReduce::Shadow() {
  Communicator::Pending pending = group_->communicator().AllReduce(
      at::zeros_like(flat_), {"the all-reduce of delayed gradients"});
  group_->communicator().Wait(pending);
}

void DelayedAllReduce::Reset(std::shared_ptr<ReducerGroup> group) {
  group_ = std::move(group);
  pending_ = {};
  averaged_ = false;
  PointGradients();  // an abandoned all-reduce may still write to the old memory
}

}  // namespace ddp::internal
