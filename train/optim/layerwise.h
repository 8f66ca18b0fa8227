// Optimizers that look at a whole parameter: a ZeroRedundancyOptimizer needs Shard::kWhole. The
// ones of PyTorch have the names, defaults and formulas of torch.optim of PyTorch 2.15. What
// constructors and step() throw, see optimizer_of.h.
//
// Norms stay on the device: the host does not wait for them.
#ifndef DDP_TRAIN_OPTIM_LAYERWISE_H_
#define DDP_TRAIN_OPTIM_LAYERWISE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "train/optim/elementwise.h"
#include "train/optim/momentum_options.h"
#include "train/optim/optimizer_of.h"

namespace ddp::train {

class AdafactorOptions : public internal::OptionsOf<AdafactorOptions> {
 public:
  static constexpr char kName[] = "Adafactor";

  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);                           // the largest relative step
  TORCH_ARG(double, beta2_decay) = -0.8;           // at most 0
  TORCH_ARG(std::optional<double>, eps1) = {};     // unset: the epsilon of the parameter's type
  TORCH_ARG(double, eps2) = 1e-3;                  // the least norm of a parameter in its step
  TORCH_ARG(double, d) = 1.0;                      // clips the update's root mean square, >= 1
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;  // steps against the gradient otherwise

 public:
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("beta2_decay", beta2_decay_);
    visit("eps1", eps1_);
    visit("eps2", eps2_);
    visit("d", d_);
    visit("weight_decay", weight_decay_);
    visit("maximize", maximize_);
  }
};

class AdafactorParamState : public internal::ParamStateOf<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, row_var) = {};   // of a parameter with two or more dimensions
  TORCH_ARG(at::Tensor, col_var) = {};   // of it, too
  TORCH_ARG(at::Tensor, variance) = {};  // of any other parameter

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("step", step_);
    visit("row_var", row_var_);
    visit("col_var", col_var_);
    visit("variance", variance_);
  }
};

// Keeps the second moments of a matrix as a row and a column (Shazeer and Stern, "Adafactor:
// Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018, in PyTorch's form, which has a
// learning rate and decoupled weight decay). Throws ConfigurationError for complex parameters.
class Adafactor final : public internal::OptimizerOf<AdafactorOptions, AdafactorParamState> {
 public:
  using internal::OptimizerOf<AdafactorOptions, AdafactorParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const AdafactorOptions& options,
              AdafactorParamState& state) const override;
};

class MuonOptions : public internal::OptionsOf<MuonOptions>, public MomentumOptions {
 public:
  using Coefficients = std::tuple<double, double, double>;
  static constexpr char kName[] = "Muon";

  MuonOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;  // decoupled
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(Coefficients, ns_coefficients) = {3.4445, -4.7750, 2.0315};
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(int64_t, ns_steps) = 5;  // of the Newton-Schulz iteration, 0 to 99
  // "original", "match_rms_adamw" or "spectral_unclamped".
  TORCH_ARG(std::string, adjust_lr_fn) = "original";

 public:
  double& momentum_or_beta1() override { return momentum_; }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("weight_decay", weight_decay_);
    visit("momentum", momentum_);
    visit("nesterov", nesterov_);
    visit("ns_coefficients", ns_coefficients_);
    visit("eps", eps_);
    visit("ns_steps", ns_steps_);
    visit("adjust_lr_fn", adjust_lr_fn_);
  }
};

class MuonParamState : public internal::ParamStateOf<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer) = {};

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("momentum_buffer", momentum_buffer_);
  }
};

// Momentum whose matrices are made orthogonal by a Newton-Schulz iteration in bfloat16 (Jordan,
// "Muon: An optimizer for hidden layers in neural networks", 2024). For the matrices of hidden
// layers: step() throws ConfigurationError for a real parameter of other than two dimensions and
// more than one element, and for a complex one.
class Muon final : public internal::OptimizerOf<MuonOptions, MuonParamState> {
 public:
  using internal::OptimizerOf<MuonOptions, MuonParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const MuonOptions& options,
              MuonParamState& state) const override;
};

class LAMBOptions : public internal::OptionsOf<LAMBOptions>, public MomentumOptions {
 public:
  static constexpr char kName[] = "LAMB";

  LAMBOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, bias_correction) = true;

 public:
  double& momentum_or_beta1() override { return std::get<0>(betas_); }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("betas", betas_);
    visit("eps", eps_);
    visit("weight_decay", weight_decay_);
    visit("bias_correction", bias_correction_);
  }
};

class LAMBParamState : public internal::ParamStateOf<LAMBParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_avg_sq) = {};

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("step", step_);
    visit("exp_avg", exp_avg_);
    visit("exp_avg_sq", exp_avg_sq_);
  }
};

// AdamW's step, scaled so that it is as long as the parameter, for large batches (You et al.,
// "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2 with the identity for phi).
// A parameter or a step of norm 0 is not scaled. Not in PyTorch.
class LAMB final : public internal::OptimizerOf<LAMBOptions, LAMBParamState> {
 public:
  using internal::OptimizerOf<LAMBOptions, LAMBParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const LAMBOptions& options,
              LAMBParamState& state) const override;
};

class LARSOptions : public internal::OptionsOf<LARSOptions>, public MomentumOptions {
 public:
  static constexpr char kName[] = "LARS";

  LARSOptions(double lr = 0.1) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, trust_coefficient) = 1e-3;
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(bool, nesterov) = false;

 public:
  double& momentum_or_beta1() override { return momentum_; }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("momentum", momentum_);
    visit("weight_decay", weight_decay_);
    visit("trust_coefficient", trust_coefficient_);
    visit("eps", eps_);
    visit("nesterov", nesterov_);
  }
};

class LARSParamState : public internal::ParamStateOf<LARSParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer) = {};

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("momentum_buffer", momentum_buffer_);
  }
};

// SGD with momentum whose gradients are scaled by trust_coefficient * |p| / (|g| + weight_decay *
// |p|), for large batches (You et al., "Large Batch Training of Convolutional Networks", 2017). A
// parameter or a gradient of norm 0 is not scaled. Put biases and norms' weights into a group of
// another optimizer, or of no weight decay. Not in PyTorch.
class LARS final : public internal::OptimizerOf<LARSOptions, LARSParamState> {
 public:
  using internal::OptimizerOf<LARSOptions, LARSParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const LARSOptions& options,
              LARSParamState& state) const override;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_OPTIM_LAYERWISE_H_
