#include "train/optim/fused_adam.h"

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/utils.h>

namespace ddp::train {

namespace {

// The kernel goes through the tensors of a parameter in the order of memory.
bool IsFusable(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  return (parameter.is_cpu() || parameter.is_cuda()) && parameter.is_floating_point() &&
         parameter.layout() == at::kStrided && gradient.layout() == at::kStrided &&
         gradient.scalar_type() == parameter.scalar_type() &&
         parameter.is_non_overlapping_and_dense();
}

bool AllFusable(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined() && !IsFusable(parameter)) return false;
    }
  }
  return true;
}

at::Tensor ZerosLike(const at::Tensor& parameter) {
  return at::zeros_like(parameter, at::MemoryFormat::Preserve);
}

// Returns `tensor` with the strides of `parameter`.
at::Tensor InOrderOf(const at::Tensor& parameter, const at::Tensor& tensor) {
  if (tensor.strides() == parameter.strides()) return tensor;
  return at::empty_like(parameter, at::MemoryFormat::Preserve).copy_(tensor);
}

// The tensors of parameters of one type, on one device, that have made the same number of steps.
struct Batch {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
};
using Key = std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType, int64_t /*steps*/>;

// Adds a parameter to its batch, and counts its step.
template <typename State, typename Options>
void Add(const at::Tensor& parameter, const Options& options,
         std::unique_ptr<torch::optim::OptimizerParamState>& slot, std::map<Key, Batch>& batches) {
  if (slot == nullptr) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(ZerosLike(parameter));
    fresh->exp_avg_sq(ZerosLike(parameter));
    slot = std::move(fresh);
  }
  auto& state = static_cast<State&>(*slot);
  if (options.amsgrad() && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(ZerosLike(parameter));
  }
  // A state that was loaded, or whose parameter got other strides.
  state.exp_avg(InOrderOf(parameter, state.exp_avg()));
  state.exp_avg_sq(InOrderOf(parameter, state.exp_avg_sq()));
  state.step(state.step() + 1);
  Batch& batch = batches[{parameter.device().type(), parameter.device().index(),
                          parameter.scalar_type(), state.step()}];
  batch.parameters.push_back(parameter);
  batch.gradients.push_back(InOrderOf(parameter, parameter.grad()));
  batch.exp_avgs.push_back(state.exp_avg());
  batch.exp_avg_sqs.push_back(state.exp_avg_sq());
  if (!options.amsgrad()) return;
  state.max_exp_avg_sq(InOrderOf(parameter, state.max_exp_avg_sq()));
  batch.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
}

// Makes the step of all parameters, by `kernel`.
template <typename Options, typename State, typename Kernel>
void Step(torch::optim::Optimizer& optimizer, Kernel kernel) {
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    std::map<Key, Batch> batches;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      Add<State>(parameter, options, optimizer.state()[parameter.unsafeGetTensorImpl()], batches);
    }
    for (auto& [key, batch] : batches) {
      const auto& [type, index, scalar_type, steps] = key;
      const at::Tensor step =
          at::full({}, static_cast<double>(steps),
                   at::TensorOptions(at::Device(type, index)).dtype(at::kFloat));
      const std::vector<at::Tensor> all_steps(batch.parameters.size(), step);
      kernel(batch.parameters, batch.gradients, batch.exp_avgs, batch.exp_avg_sqs,
             batch.max_exp_avg_sqs, all_steps, options.lr(), std::get<0>(options.betas()),
             std::get<1>(options.betas()), options.weight_decay(), options.eps(), options.amsgrad(),
             /*maximize=*/false);
    }
  }
}

at::Tensor LossOf(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss = LossOf(closure);
  if (AllFusable(param_groups())) {
    using torch::optim::AdamOptions;
    Step<AdamOptions, torch::optim::AdamParamState>(
        *this, [](auto&&... arguments) { at::_fused_adam_(arguments...); });
  } else {
    torch::optim::Adam::step();
  }
  return loss;
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss = LossOf(closure);
  if (AllFusable(param_groups())) {
    using torch::optim::AdamWOptions;
    Step<AdamWOptions, torch::optim::AdamWParamState>(
        *this, [](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    torch::optim::AdamW::step();
  }
  return loss;
}

}  // namespace ddp::train
