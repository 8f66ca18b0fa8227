#include "train/gradients/clip_grad.h"

#include <map>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "ddp/common/error.h"
#include "ddp/process_group.h"

namespace ddp::train {

namespace {

// Gradients of one device and one type, as LibTorch's functions on lists of tensors need them.
// The order is the same on all ranks.
using Lists =
    std::map<std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>>;

// The gradients of `parameters`. Writes the device of the first to `device`, where there is one.
Lists GradientsOf(const std::vector<at::Tensor>& parameters, at::Device* device = nullptr) {
  Lists lists;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided) {
      throw ConfigurationError("a gradient is sparse, and cannot be clipped; leave it out");
    }
    if (lists.empty() && device != nullptr) *device = gradient.device();
    lists[{gradient.device().type(), gradient.device().index(), gradient.scalar_type()}].push_back(
        gradient);
  }
  return lists;
}

// Returns the norm of the norms of all ranks.
at::Tensor OverRanks(const at::Tensor& norm, double norm_type, ProcessGroup& group) {
  const at::Tensor own = norm.to(at::TensorOptions(group.device()).dtype(at::kDouble)).view({1});
  const at::Tensor all = at::empty({group.size()}, own.options());
  group.all_gather(all, own);
  return at::linalg_vector_norm(all, norm_type).to(norm.options());
}

}  // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& parameters,
                          const ClipGradOptions& options) {
  const at::NoGradGuard no_grad;
  at::Device device = options.shards_of ? options.shards_of->device() : at::Device(at::kCPU);
  const Lists lists = GradientsOf(parameters, &device);
  std::vector<at::Tensor> norms;
  for (const auto& [key, gradients] : lists) {
    for (const at::Tensor& norm : at::_foreach_norm(gradients, options.norm_type)) {
      norms.push_back(norm.to(device, norm.scalar_type(), /*non_blocking=*/true));
    }
  }
  at::Tensor total = norms.empty() ? at::zeros({}, at::TensorOptions(device))
                                   : at::linalg_vector_norm(at::stack(norms), options.norm_type);
  if (options.shards_of) total = OverRanks(total, options.norm_type, *options.shards_of);
  if (options.error_if_nonfinite && !total.isfinite().item<bool>()) {
    throw NonFiniteGradientError(
        "the norm of order " + std::to_string(options.norm_type) + " of the gradients is " +
        std::to_string(total.item<double>()) +
        ", so they cannot be clipped; leave the step out, or set error_if_nonfinite = false");
  }
  return total;
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm) {
  const at::NoGradGuard no_grad;
  const at::Tensor factor = (max_norm / (total_norm + 1e-6)).clamp_max_(1.0);
  for (const auto& [key, gradients] : GradientsOf(parameters)) {
    const at::Device device = gradients.front().device();
    at::_foreach_mul_(gradients, factor.to(device, factor.scalar_type(), /*non_blocking=*/true));
  }
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipGradOptions& options) {
  const at::Tensor total = get_total_norm(parameters, options);
  clip_grads_with_norm_(parameters, max_norm, total);
  return total;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  const at::NoGradGuard no_grad;
  for (const auto& [key, gradients] : GradientsOf(parameters)) {
    at::_foreach_clamp_min_(gradients, -clip_value);
    at::_foreach_clamp_max_(gradients, clip_value);
  }
}

}  // namespace ddp::train
