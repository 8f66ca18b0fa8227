#include "train/gradients/grad_scaler.h"

#include <tuple>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/optimizer.h>

#include "ddp/common/error.h"
#include "ddp/process_group.h"

namespace ddp::train {

namespace {

void Require(bool holds, const std::string& message) {
  if (!holds) throw ConfigurationError("GradScaler: " + message);
}

// Returns true where LibTorch has kernels for a scaler.
bool HasKernels(at::Device device) { return device.is_cpu() || device.is_cuda(); }

// Multiplies the gradients by `inverse`, and adds to `found_inf` when one is not finite.
void Unscale(const std::vector<at::Tensor>& gradients, at::Tensor found_inf,
             const at::Tensor& inverse) {
  if (HasKernels(found_inf.device())) {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse);
    return;
  }
  for (const at::Tensor& gradient : gradients) {
    found_inf.add_(gradient.isfinite().all().logical_not_().to(found_inf.scalar_type()));
    gradient.mul_(inverse);
  }
}

// The same as at::_amp_update_scale_, by common operations.
void UpdateScale(at::Tensor& scale, at::Tensor& tracker, const at::Tensor& found_inf,
                 const GradScalerOptions& options) {
  const at::Tensor found = found_inf > 0;
  const at::Tensor grows =
      (tracker + 1 == options.growth_interval).logical_and_(found.logical_not());
  const at::Tensor grown = scale * options.growth_factor;
  const at::Tensor kept = at::where(grows.logical_and(grown.isfinite()), grown, scale);
  scale.copy_(at::where(found, scale * options.backoff_factor, kept));
  tracker.copy_(at::where(found.logical_or(grows), at::zeros_like(tracker), tracker + 1));
}

using Key = std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>;

// Returns the gradients of one device and one type together: the values of a sparse one.
std::map<Key, std::vector<at::Tensor>> GradientsOf(torch::optim::Optimizer& optimizer) {
  std::map<Key, std::vector<at::Tensor>> lists;
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      Require(gradient.scalar_type() != at::kHalf,
              "a gradient is float16; keep the parameters in float32, under autocast");
      const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
      lists[{values.device().type(), values.device().index(), values.scalar_type()}].push_back(
          values);
    }
  }
  return lists;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : options_(std::move(options)), first_scale_(options_.init_scale) {
  Require(options_.init_scale > 0, "init_scale must be greater than 0");
  Require(options_.growth_factor > 1, "growth_factor must be greater than 1");
  Require(options_.backoff_factor > 0 && options_.backoff_factor < 1,
          "backoff_factor must be greater than 0 and less than 1");
  Require(options_.growth_interval >= 1, "growth_interval must be at least 1");
}

void GradScaler::MakeScale(at::Device device) {
  if (scale_.defined()) return;
  scale_ = at::full({}, first_scale_, at::TensorOptions(device).dtype(at::kFloat));
  growth_tracker_ = at::full({}, first_growth_, at::TensorOptions(device).dtype(at::kInt));
}

void GradScaler::RequireScale(const char* function) const {
  Require(scale_.defined(), std::string(function) + " before scale(): scale the loss first");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!options_.enabled) return outputs;
  MakeScale(outputs.device());
  return outputs * scale_.to(outputs.device(), at::kFloat, /*non_blocking=*/true);
}

at::Tensor GradScaler::FoundInf(torch::optim::Optimizer& optimizer) const {
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  at::Tensor found = at::zeros({}, scale_.options());
  for (const auto& [key, gradients] : GradientsOf(optimizer)) {
    const at::Device device = gradients.front().device();
    if (device == found.device()) {
      Unscale(gradients, found, inverse);
      continue;
    }
    const at::Tensor there = at::zeros({}, found.options().device(device));
    Unscale(gradients, there, inverse.to(device, at::kFloat, /*non_blocking=*/true));
    found.add_(there.to(found.device(), at::kFloat, /*non_blocking=*/true));
  }
  if (options_.group == nullptr) return found;
  const at::Tensor agreed = found.to(options_.group->device()).view({1});
  options_.group->all_reduce(agreed, ReduceOp::kMax);
  return agreed.to(found.device()).squeeze(0);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  RequireScale("unscale_()");
  const auto found = progress_.find(&optimizer);
  Require(
      found == progress_.end(),
      "unscale_() was called already for this optimizer, or its step() was; call update() first");
  const at::NoGradGuard no_grad;
  progress_[&optimizer] = {.found_inf = FoundInf(optimizer)};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  RequireScale("step()");
  if (!progress_.contains(&optimizer)) unscale_(optimizer);
  Progress& progress = progress_[&optimizer];
  Require(!progress.stepped, "step() was called already for this optimizer; call update() first");
  progress.stepped = true;
  if (progress.found_inf.item<float>() != 0) return false;
  optimizer.step();
  return true;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  RequireScale("update()");
  Require(!progress_.empty(), "update() before step(): no gradient was checked");
  const at::NoGradGuard no_grad;
  at::Tensor found = at::zeros({}, scale_.options());
  for (const auto& [optimizer, progress] : progress_) found.add_(progress.found_inf);
  if (HasKernels(scale_.device())) {
    at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
  } else {
    UpdateScale(scale_, growth_tracker_, found, options_);
  }
  progress_.clear();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  Require(new_scale > 0, "the new scale must be greater than 0");
  if (scale_.defined()) scale_.fill_(new_scale);
  first_scale_ = new_scale;
  progress_.clear();
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<float>() : first_scale_;
}

SavedState GradScaler::save_state() const {
  SavedState state;
  state.values["kind"] = std::string("GradScaler");
  state.values["scale"] = get_scale();
  state.values["growth_tracker"] =
      growth_tracker_.defined() ? int64_t{growth_tracker_.item<int32_t>()} : first_growth_;
  return state;
}

void GradScaler::load_state(const SavedState& state) {
  const auto& kind = state.value<std::string>("kind");
  Require(kind == "GradScaler", "the saved state is of a " + kind);
  const double scale = state.value<double>("scale");
  const int64_t growth = state.value<int64_t>("growth_tracker");
  if (!options_.enabled) return;
  first_scale_ = scale;
  first_growth_ = growth;
  progress_.clear();
  if (!scale_.defined()) return;
  scale_.fill_(scale);
  growth_tracker_.fill_(growth);
}

}  // namespace ddp::train
