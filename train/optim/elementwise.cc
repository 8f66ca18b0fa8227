#include "train/optim/elementwise.h"

#include <cmath>
#include <optional>

#include <ATen/ops/abs.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>

namespace ddp::train {

namespace internal {

std::string ProblemOf(double lr, double eps, double weight_decay) {
  if (!(lr >= 0)) return "lr is " + std::to_string(lr) + ", it must not be negative";
  if (!(eps >= 0)) return "eps is " + std::to_string(eps) + ", it must not be negative";
  if (weight_decay >= 0) return "";
  return "weight_decay is " + std::to_string(weight_decay) + ", it must not be negative";
}

std::string ProblemOfBetas(const Betas& betas) {
  for (const double beta : {std::get<0>(betas), std::get<1>(betas)}) {
    if (!(beta >= 0 && beta < 1)) {
      return "a beta is " + std::to_string(beta) + ", it must be at least 0 and less than 1";
    }
  }
  return "";
}

}  // namespace internal

namespace {

using internal::ProblemOf;
using internal::ProblemOfBetas;

// Complex numbers are updated as pairs of real ones.
at::Tensor Real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

at::Tensor ZerosLike(const at::Tensor& parameter) {
  return at::zeros_like(parameter, at::MemoryFormat::Preserve);
}

// Returns the gradient of what is minimized, with L2 regularization.
at::Tensor Regularized(const at::Tensor& parameter, const at::Tensor& gradient, bool maximize,
                       double weight_decay) {
  const at::Tensor signed_gradient = maximize ? gradient.neg() : gradient;
  return weight_decay == 0 ? signed_gradient : signed_gradient.add(parameter, weight_decay);
}

// The same, or decays the parameter itself.
template <typename Options>
at::Tensor Decayed(at::Tensor& parameter, const at::Tensor& gradient, const Options& options) {
  if (!options.decoupled_weight_decay()) {
    return Regularized(parameter, gradient, options.maximize(), options.weight_decay());
  }
  parameter.mul_(1 - options.lr() * options.weight_decay());
  return options.maximize() ? gradient.neg() : gradient;
}

}  // namespace

std::string NAdamOptions::Problem() const {
  std::string problem = ProblemOf(lr_, eps_, weight_decay_) + ProblemOfBetas(betas_);
  if (problem.empty() && !(momentum_decay_ >= 0)) problem = "momentum_decay is negative";
  return problem;
}

void NAdam::update(at::Tensor parameter, at::Tensor gradient, const NAdamOptions& options,
                   NAdamParamState& state) const {
  if (!state.exp_avg().defined()) {
    state.exp_avg(ZerosLike(parameter)).exp_avg_sq(ZerosLike(parameter));
  }
  const auto [beta1, beta2] = options.betas();
  const double step = ++state.step();
  at::Tensor p = Real(parameter);
  const at::Tensor g = Decayed(p, Real(gradient), options);
  at::Tensor exp_avg = Real(state.exp_avg());
  at::Tensor exp_avg_sq = Real(state.exp_avg_sq());

  const auto momentum_of = [&, first = beta1](double at_step) {
    return first * (1.0 - 0.5 * std::pow(0.96, at_step * options.momentum_decay()));
  };
  const double mu = momentum_of(step);
  const double mu_next = momentum_of(step + 1);
  state.mu_product() *= mu;
  exp_avg.lerp_(g, 1 - beta1);
  exp_avg_sq.mul_(beta2).addcmul_(g, g, 1 - beta2);
  const at::Tensor denominator =
      exp_avg_sq.div(1 - std::pow(beta2, step)).sqrt_().add_(options.eps());
  p.addcdiv_(g, denominator, -options.lr() * (1.0 - mu) / (1.0 - state.mu_product()));
  p.addcdiv_(exp_avg, denominator, -options.lr() * mu_next / (1.0 - state.mu_product() * mu_next));
}

std::string RAdamOptions::Problem() const {
  return ProblemOf(lr_, eps_, weight_decay_) + ProblemOfBetas(betas_);
}

void RAdam::update(at::Tensor parameter, at::Tensor gradient, const RAdamOptions& options,
                   RAdamParamState& state) const {
  if (!state.exp_avg().defined()) {
    state.exp_avg(ZerosLike(parameter)).exp_avg_sq(ZerosLike(parameter));
  }
  const auto [beta1, beta2] = options.betas();
  const double step = ++state.step();
  at::Tensor p = Real(parameter);
  const at::Tensor g = Decayed(p, Real(gradient), options);
  at::Tensor exp_avg = Real(state.exp_avg());
  at::Tensor exp_avg_sq = Real(state.exp_avg_sq());

  exp_avg.lerp_(g, 1 - beta1);
  exp_avg_sq.mul_(beta2).addcmul_(g, g, 1 - beta2);
  const double correction1 = 1 - std::pow(beta1, step);
  const double correction2 = 1 - std::pow(beta2, step);
  const double longest = 2 / (1 - beta2) - 1;  // of the approximated simple moving average
  const double length = longest - 2 * step * std::pow(beta2, step) / correction2;
  if (length <= 5.0) {  // the variance is not tractable yet
    p.add_(exp_avg, -options.lr() / correction1);
    return;
  }
  const double rectified =
      std::sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
  const double scale = options.lr() * rectified * std::sqrt(correction2) / correction1;
  p.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(options.eps()), -scale);
}

std::string AdamaxOptions::Problem() const {
  return ProblemOf(lr_, eps_, weight_decay_) + ProblemOfBetas(betas_);
}

void Adamax::update(at::Tensor parameter, at::Tensor gradient, const AdamaxOptions& options,
                    AdamaxParamState& state) const {
  if (!state.exp_avg().defined()) {
    state.exp_avg(ZerosLike(parameter)).exp_inf(ZerosLike(parameter));
  }
  const auto [beta1, beta2] = options.betas();
  const double step = ++state.step();
  at::Tensor p = Real(parameter);
  const at::Tensor g = Regularized(p, Real(gradient), options.maximize(), options.weight_decay());
  at::Tensor exp_avg = Real(state.exp_avg());
  at::Tensor exp_inf = Real(state.exp_inf());

  exp_avg.lerp_(g, 1 - beta1);
  at::maximum_out(exp_inf, exp_inf.mul_(beta2), g.abs().add_(options.eps()));
  p.addcdiv_(exp_avg, exp_inf, -options.lr() / (1 - std::pow(beta1, step)));
}

std::string AdadeltaOptions::Problem() const {
  if (!(rho_ >= 0 && rho_ <= 1)) {
    return "rho is " + std::to_string(rho_) + ", it must be between 0 and 1";
  }
  return ProblemOf(lr_, eps_, weight_decay_);
}

void Adadelta::update(at::Tensor parameter, at::Tensor gradient, const AdadeltaOptions& options,
                      AdadeltaParamState& state) const {
  if (!state.square_avg().defined()) {
    state.square_avg(ZerosLike(parameter)).acc_delta(ZerosLike(parameter));
  }
  ++state.step();
  const double rho = options.rho();
  at::Tensor p = Real(parameter);
  const at::Tensor g = Regularized(p, Real(gradient), options.maximize(), options.weight_decay());
  at::Tensor square_avg = Real(state.square_avg());
  at::Tensor acc_delta = Real(state.acc_delta());

  square_avg.mul_(rho).addcmul_(g, g, 1 - rho);
  const at::Tensor root = square_avg.add(options.eps()).sqrt_();
  const at::Tensor delta = acc_delta.add(options.eps()).sqrt_().div_(root).mul_(g);
  acc_delta.mul_(rho).addcmul_(delta, delta, 1 - rho);
  p.add_(delta, -options.lr());
}

std::string SparseAdamOptions::Problem() const {
  return ProblemOf(lr_, eps_, /*weight_decay=*/0) + ProblemOfBetas(betas_);
}

void SparseAdam::update(at::Tensor parameter, at::Tensor gradient, const SparseAdamOptions& options,
                        SparseAdamParamState& state) const {
  if (parameter.is_complex()) {
    throw ConfigurationError("SparseAdam: a parameter is complex; give it to another optimizer");
  }
  if (!state.exp_avg().defined()) {
    state.exp_avg(ZerosLike(parameter)).exp_avg_sq(ZerosLike(parameter));
  }
  const auto [beta1, beta2] = options.betas();
  const double step = ++state.step();
  const at::Tensor rows = gradient.coalesce();  // each row once
  const at::Tensor g = options.maximize() ? rows.values().neg() : rows.values();
  if (g.numel() == 0) return;
  c10::List<std::optional<at::Tensor>> places;
  for (const at::Tensor& indices : rows.indices().unbind()) places.push_back(indices);

  at::Tensor mean = at::index(state.exp_avg(), places);
  mean.add_(g.sub(mean).mul_(1 - beta1));
  at::index_put_(state.exp_avg(), places, mean);
  at::Tensor mean_square = at::index(state.exp_avg_sq(), places);
  mean_square.add_(g.square().sub_(mean_square).mul_(1 - beta2));
  at::index_put_(state.exp_avg_sq(), places, mean_square);
  const double step_size =
      options.lr() * std::sqrt(1 - std::pow(beta2, step)) / (1 - std::pow(beta1, step));
  const at::Tensor change = mean.div_(mean_square.sqrt_().add_(options.eps())).mul_(-step_size);
  at::index_put_(parameter, places, change, /*accumulate=*/true);
}

}  // namespace ddp::train
