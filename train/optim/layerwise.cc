#include "train/optim/layerwise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

namespace ddp::train {

namespace {

using internal::ProblemOf;
using internal::ProblemOfBetas;

at::Tensor ZerosLike(const at::Tensor& parameter) {
  return at::zeros_like(parameter, at::MemoryFormat::Preserve);
}

void RefuseComplex(const at::Tensor& parameter, const char* kind) {
  if (!parameter.is_complex()) return;
  throw ConfigurationError(std::string(kind) +
                           ": a parameter is complex; give it to another optimizer");
}

double RootOfSize(const at::Tensor& tensor) {
  return std::sqrt(static_cast<double>(tensor.numel()));
}

double EpsilonOf(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// Returns the mean of the squares along a dimension, which stays with size 1.
at::Tensor MeanSquare(const at::Tensor& gradient, int64_t dimension) {
  return at::linalg_vector_norm(gradient, 2, at::IntArrayRef{dimension}, /*keepdim=*/true)
      .square_()
      .div_(gradient.size(dimension));
}

// Returns the factor of the rate for a matrix of that shape.
double AdjustmentOf(const std::string& kind, double rows, double columns) {
  if (kind == "match_rms_adamw") return 0.2 * std::sqrt(std::max(rows, columns));
  const double ratio = rows / columns;
  return std::sqrt(kind == "spectral_unclamped" ? ratio : std::max(1.0, ratio));
}

// Returns `matrix`, made nearly orthogonal, in bfloat16.
at::Tensor Orthogonal(const at::Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = matrix.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (tall) x = x.t();
  x.div_(x.norm().clamp_min(options.eps()));
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const at::Tensor gram = at::matmul(x, x.t());
    const at::Tensor change = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    x = at::addmm(x, change, x, /*beta=*/a);
  }
  return tall ? x.t() : x;
}

// Returns numerator / denominator, or 1 where one of the norms is 0. All are of one element.
at::Tensor Trust(const at::Tensor& numerator, const at::Tensor& denominator,
                 const at::Tensor& first_norm, const at::Tensor& second_norm) {
  return at::where((first_norm > 0).logical_and_(second_norm > 0), numerator / denominator,
                   at::ones_like(first_norm));
}

}  // namespace

std::string AdafactorOptions::Problem() const {
  if (!(beta2_decay_ <= 0)) return "beta2_decay must be at most 0";
  if (eps1_.has_value() && !(*eps1_ >= 0)) return "eps1 must not be negative";
  if (!(eps2_ >= 0)) return "eps2 must not be negative";
  if (!(d_ >= 1)) return "d must be at least 1";
  return ProblemOf(lr_, 0, weight_decay_);
}

void Adafactor::update(at::Tensor parameter, at::Tensor gradient, const AdafactorOptions& options,
                       AdafactorParamState& state) const {
  RefuseComplex(parameter, AdafactorOptions::kName);
  const at::Tensor g = options.maximize() ? gradient.neg() : gradient;
  const bool factored = g.dim() > 1;
  if (state.step() == 0 && factored) {
    std::vector<int64_t> rows = g.sizes().vec();
    std::vector<int64_t> columns = rows;
    rows.back() = 1;
    columns[columns.size() - 2] = 1;
    state.row_var(g.new_zeros(rows)).col_var(g.new_zeros(columns));
  } else if (state.step() == 0) {
    state.variance(ZerosLike(g));
  }
  const double step = ++state.step();
  const double eps1 = options.eps1().value_or(EpsilonOf(parameter.scalar_type()));
  const double weight = std::pow(step, options.beta2_decay());
  const double relative_step = std::min(options.lr(), 1 / std::sqrt(step));
  const at::Tensor step_size =
      (parameter.norm(2) / RootOfSize(parameter)).clamp_min_(options.eps2()).mul_(relative_step);
  if (options.weight_decay() != 0) parameter.mul_(1 - options.lr() * options.weight_decay());

  at::Tensor estimate;
  if (factored) {
    state.row_var().lerp_(MeanSquare(g, -1), weight);
    state.col_var().lerp_(MeanSquare(g, -2), weight);
    estimate = at::matmul(state.row_var(), state.col_var());
    estimate.div_(state.row_var().mean({-2}, /*keepdim=*/true).clamp_min_(eps1));
  } else {
    state.variance().lerp_(g * g, weight);
    estimate = state.variance().clone();
  }
  const at::Tensor change = estimate.clamp_min_(eps1 * eps1).rsqrt_().mul_(g);
  const at::Tensor clip = (change.norm(2) / (RootOfSize(change) * options.d())).clamp_min_(1.0);
  parameter.sub_(change.mul_(step_size / clip));
}

std::string MuonOptions::Problem() const {
  if (!(momentum_ >= 0)) return "momentum must not be negative";
  if (ns_steps_ < 0 || ns_steps_ >= 100) return "ns_steps must be at least 0 and less than 100";
  if (adjust_lr_fn_ != "original" && adjust_lr_fn_ != "match_rms_adamw" &&
      adjust_lr_fn_ != "spectral_unclamped") {
    return "adjust_lr_fn is \"" + adjust_lr_fn_ +
           "\", it must be original, match_rms_adamw or spectral_unclamped";
  }
  return ProblemOf(lr_, eps_, weight_decay_);
}

void Muon::update(at::Tensor parameter, at::Tensor gradient, const MuonOptions& options,
                  MuonParamState& state) const {
  RefuseComplex(parameter, MuonOptions::kName);
  // A ZeroRedundancyOptimizer learns the type of a state from a parameter of one element.
  if (parameter.numel() == 1) {
    parameter = parameter.view({1, 1});
    gradient = gradient.view({1, 1});
  }
  if (parameter.dim() != 2) {
    throw ConfigurationError(
        "Muon: a parameter has " + std::to_string(parameter.dim()) +
        " dimensions; give Muon the matrices of hidden layers (through a ZeroRedundancyOptimizer "
        "with Shard::kWhole), and the rest to another optimizer");
  }
  if (!state.momentum_buffer().defined()) state.momentum_buffer(ZerosLike(gradient));
  at::Tensor buffer = state.momentum_buffer().view_as(gradient);
  buffer.lerp_(gradient, 1 - options.momentum());
  const at::Tensor direction =
      options.nesterov() ? gradient.lerp(buffer, options.momentum()) : buffer;
  const at::Tensor change = Orthogonal(direction, options);
  const double adjusted =
      options.lr() * AdjustmentOf(options.adjust_lr_fn(), parameter.size(0), parameter.size(1));
  parameter.mul_(1 - options.lr() * options.weight_decay());
  parameter.add_(change, -adjusted);
}

std::string LAMBOptions::Problem() const {
  return ProblemOf(lr_, eps_, weight_decay_) + ProblemOfBetas(betas_);
}

void LAMB::update(at::Tensor parameter, at::Tensor gradient, const LAMBOptions& options,
                  LAMBParamState& state) const {
  RefuseComplex(parameter, LAMBOptions::kName);
  if (!state.exp_avg().defined()) {
    state.exp_avg(ZerosLike(parameter)).exp_avg_sq(ZerosLike(parameter));
  }
  const auto [beta1, beta2] = options.betas();
  const double step = ++state.step();
  state.exp_avg().lerp_(gradient, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const double correction1 = options.bias_correction() ? 1 - std::pow(beta1, step) : 1;
  const double correction2 = options.bias_correction() ? 1 - std::pow(beta2, step) : 1;
  const at::Tensor root = (state.exp_avg_sq() / correction2).sqrt_().add_(options.eps());
  at::Tensor change = (state.exp_avg() / correction1).div_(root);
  if (options.weight_decay() != 0) change.add_(parameter, options.weight_decay());
  const at::Tensor length = parameter.norm(2);
  const at::Tensor of_change = change.norm(2);
  parameter.sub_(change.mul_(Trust(length, of_change, length, of_change) * options.lr()));
}

std::string LARSOptions::Problem() const {
  if (!(momentum_ >= 0)) return "momentum must not be negative";
  if (nesterov_ && momentum_ == 0) return "nesterov needs a momentum";
  if (!(trust_coefficient_ > 0)) return "trust_coefficient must be greater than 0";
  return ProblemOf(lr_, eps_, weight_decay_);
}

void LARS::update(at::Tensor parameter, at::Tensor gradient, const LARSOptions& options,
                  LARSParamState& state) const {
  RefuseComplex(parameter, LARSOptions::kName);
  const at::Tensor length = parameter.norm(2);
  const at::Tensor of_gradient = gradient.norm(2);
  const at::Tensor trust =
      Trust(length * options.trust_coefficient(),
            of_gradient + length * options.weight_decay() + options.eps(), length, of_gradient);
  at::Tensor g = gradient.add(parameter, options.weight_decay()).mul_(trust);
  if (options.momentum() != 0) {
    if (!state.momentum_buffer().defined()) {
      state.momentum_buffer(g.clone());
    } else {
      state.momentum_buffer().mul_(options.momentum()).add_(g);
    }
    g = options.nesterov() ? g.add(state.momentum_buffer(), options.momentum())
                           : state.momentum_buffer();
  }
  parameter.add_(g, -options.lr());
}

}  // namespace ddp::train
