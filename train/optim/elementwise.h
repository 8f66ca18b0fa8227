// Optimizers of PyTorch that LibTorch lacks, and that treat each element by itself: a
// ZeroRedundancyOptimizer may cut parameters anywhere. Names, defaults and formulas are those of
// torch.optim of PyTorch 2.15, without `capturable`, `differentiable` and `foreach`. What
// constructors and step() throw, see optimizer_of.h.
//
//   train::NAdam optimizer(model->parameters(), train::NAdamOptions(1e-3).weight_decay(0.01));
//
// The states of one step lie in the optimizer: `step`, and tensors like the parameter under the
// names of PyTorch's state_dict().
#ifndef DDP_TRAIN_OPTIM_ELEMENTWISE_H_
#define DDP_TRAIN_OPTIM_ELEMENTWISE_H_

#include <cstdint>
#include <string>
#include <tuple>

#include "train/optim/momentum_options.h"
#include "train/optim/optimizer_of.h"

namespace ddp::train {

// Options of an optimizer with two betas.
using Betas = std::tuple<double, double>;

class NAdamOptions : public internal::OptionsOf<NAdamOptions>, public MomentumOptions {
 public:
  static constexpr char kName[] = "NAdam";

  NAdamOptions(double lr = 2e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, momentum_decay) = 4e-3;
  TORCH_ARG(bool, decoupled_weight_decay) = false;  // as AdamW
  TORCH_ARG(bool, maximize) = false;                // steps against the gradient otherwise

 public:
  double& momentum_or_beta1() override { return std::get<0>(betas_); }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("betas", betas_);
    visit("eps", eps_);
    visit("weight_decay", weight_decay_);
    visit("momentum_decay", momentum_decay_);
    visit("decoupled_weight_decay", decoupled_weight_decay_);
    visit("maximize", maximize_);
  }
};

class NAdamParamState : public internal::ParamStateOf<NAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(double, mu_product) = 1;
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_avg_sq) = {};

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("step", step_);
    visit("mu_product", mu_product_);
    visit("exp_avg", exp_avg_);
    visit("exp_avg_sq", exp_avg_sq_);
  }
};

// Adam with Nesterov's momentum (Dozat, "Incorporating Nesterov Momentum into Adam", 2016).
class NAdam final : public internal::OptimizerOf<NAdamOptions, NAdamParamState> {
 public:
  using internal::OptimizerOf<NAdamOptions, NAdamParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const NAdamOptions& options,
              NAdamParamState& state) const override;
};

class RAdamOptions : public internal::OptionsOf<RAdamOptions>, public MomentumOptions {
 public:
  static constexpr char kName[] = "RAdam";

  RAdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, decoupled_weight_decay) = false;  // as AdamW
  TORCH_ARG(bool, maximize) = false;                // steps against the gradient otherwise

 public:
  double& momentum_or_beta1() override { return std::get<0>(betas_); }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("betas", betas_);
    visit("eps", eps_);
    visit("weight_decay", weight_decay_);
    visit("decoupled_weight_decay", decoupled_weight_decay_);
    visit("maximize", maximize_);
  }
};

class RAdamParamState : public internal::ParamStateOf<RAdamParamState> {
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

// Adam with a rectified variance (Liu et al., "On the Variance of the Adaptive Learning Rate and
// Beyond", ICLR 2020).
class RAdam final : public internal::OptimizerOf<RAdamOptions, RAdamParamState> {
 public:
  using internal::OptimizerOf<RAdamOptions, RAdamParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const RAdamOptions& options,
              RAdamParamState& state) const override;
};

class AdamaxOptions : public internal::OptionsOf<AdamaxOptions>, public MomentumOptions {
 public:
  static constexpr char kName[] = "Adamax";

  AdamaxOptions(double lr = 2e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;  // steps against the gradient otherwise

 public:
  double& momentum_or_beta1() override { return std::get<0>(betas_); }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("betas", betas_);
    visit("eps", eps_);
    visit("weight_decay", weight_decay_);
    visit("maximize", maximize_);
  }
};

class AdamaxParamState : public internal::ParamStateOf<AdamaxParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_inf) = {};

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("step", step_);
    visit("exp_avg", exp_avg_);
    visit("exp_inf", exp_inf_);
  }
};

// Adam with the infinity norm (Kingma and Ba, "Adam", ICLR 2015, section 7.1).
class Adamax final : public internal::OptimizerOf<AdamaxOptions, AdamaxParamState> {
 public:
  using internal::OptimizerOf<AdamaxOptions, AdamaxParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const AdamaxOptions& options,
              AdamaxParamState& state) const override;
};

class AdadeltaOptions : public internal::OptionsOf<AdadeltaOptions> {
 public:
  static constexpr char kName[] = "Adadelta";

  AdadeltaOptions(double lr = 1.0) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, rho) = 0.9;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;  // steps against the gradient otherwise

 public:
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("rho", rho_);
    visit("eps", eps_);
    visit("weight_decay", weight_decay_);
    visit("maximize", maximize_);
  }
};

class AdadeltaParamState : public internal::ParamStateOf<AdadeltaParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, square_avg) = {};
  TORCH_ARG(at::Tensor, acc_delta) = {};

 public:
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("step", step_);
    visit("square_avg", square_avg_);
    visit("acc_delta", acc_delta_);
  }
};

// Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.
class Adadelta final : public internal::OptimizerOf<AdadeltaOptions, AdadeltaParamState> {
 public:
  using internal::OptimizerOf<AdadeltaOptions, AdadeltaParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const AdadeltaOptions& options,
              AdadeltaParamState& state) const override;
};

class SparseAdamOptions : public internal::OptionsOf<SparseAdamOptions>, public MomentumOptions {
 public:
  static constexpr char kName[] = "SparseAdam";
  static constexpr bool kSparse = true;  // takes sparse gradients only

  SparseAdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(bool, maximize) = false;  // steps against the gradient otherwise

 public:
  double& momentum_or_beta1() override { return std::get<0>(betas_); }
  std::string Problem() const;
  template <typename Visit>
  void ForEachField(Visit visit) {
    visit("lr", lr_);
    visit("betas", betas_);
    visit("eps", eps_);
    visit("maximize", maximize_);
  }
};

class SparseAdamParamState : public internal::ParamStateOf<SparseAdamParamState> {
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

// Adam for sparse gradients, as those of an Embedding with sparse(true): only the rows of a step
// that have a gradient are read and written. Throws ConfigurationError when a gradient is dense or
// a parameter complex. A ZeroRedundancyOptimizer takes no sparse gradients.
class SparseAdam final : public internal::OptimizerOf<SparseAdamOptions, SparseAdamParamState> {
 public:
  using internal::OptimizerOf<SparseAdamOptions, SparseAdamParamState>::OptimizerOf;

 protected:
  void update(at::Tensor parameter, at::Tensor gradient, const SparseAdamOptions& options,
              SparseAdamParamState& state) const override;
};

namespace internal {

// Returns "" or the first of the options that is out of range. `beta2` is checked where betas are.
std::string ProblemOf(double lr, double eps, double weight_decay);
std::string ProblemOfBetas(const Betas& betas);

}  // namespace internal

}  // namespace ddp::train

#endif  // DDP_TRAIN_OPTIM_ELEMENTWISE_H_
