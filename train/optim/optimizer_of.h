#ifndef DDP_TRAIN_OPTIM_OPTIMIZER_OF_H_
#define DDP_TRAIN_OPTIM_OPTIMIZER_OF_H_

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include "ddp/common/error.h"

// The parts of our optimizers that are alike. A program uses only what elementwise.h and
// layerwise.h derive from them.
namespace ddp::train::internal {

// Writes fields into an archive, as LibTorch's optimizers do: by name, an undefined tensor not.
struct FieldWriter {
  torch::serialize::OutputArchive& archive;

  template <typename T>
  void operator()(const char* name, const T& field) const {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      if (!field.defined()) return;
    }
    archive.write(name, c10::IValue(field));
  }
};

// Reads them. A field that the archive lacks keeps its value.
struct FieldReader {
  torch::serialize::InputArchive& archive;

  template <typename T>
  void operator()(const char* name, T& field) const {
    c10::IValue value;
    if (archive.try_read(name, value)) field = value.to<T>();
  }
};

// The options of an optimizer. Derived has kName, lr(), ForEachField(visit), and Problem(): what is
// out of range, or "".
template <typename Derived>
class OptionsOf : public torch::optim::OptimizerCloneableOptions<Derived> {
 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    static_cast<Derived*>(this)->ForEachField(FieldReader{archive});
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Derived copy = static_cast<const Derived&>(*this);
    copy.ForEachField(FieldWriter{archive});
  }
  double get_lr() const override { return static_cast<const Derived*>(this)->lr(); }
  void set_lr(double lr) override { static_cast<Derived*>(this)->lr(lr); }
};

// The state of one parameter. Derived has ForEachField(visit).
template <typename Derived>
class ParamStateOf : public torch::optim::OptimizerCloneableParamState<Derived> {
 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    static_cast<Derived*>(this)->ForEachField(FieldReader{archive});
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Derived copy = static_cast<const Derived&>(*this);
    copy.ForEachField(FieldWriter{archive});
  }
};

// An optimizer that updates one parameter after the other. It is used, saved and loaded as
// LibTorch's are, also by a ZeroRedundancyOptimizer.
//
// Throws ConfigurationError: the constructor when an option of a parameter group is out of range;
// step() when a gradient is sparse, or dense where Options has kSparse. Thread-compatible.
template <typename Options, typename State>
class OptimizerOf : public torch::optim::Optimizer {
 public:
  explicit OptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       Options defaults = {})
      : Optimizer(groups, std::make_unique<Options>(std::move(defaults))) {
    for (const auto& group : param_groups_) {
      const std::string problem = OptionsIn(group).Problem();
      if (!problem.empty()) throw ConfigurationError(Options::kName + (": " + problem));
    }
  }
  explicit OptimizerOf(std::vector<at::Tensor> parameters, Options defaults = {})
      : OptimizerOf(std::vector{torch::optim::OptimizerParamGroup(std::move(parameters))},
                    std::move(defaults)) {}

  // Updates each parameter that has a gradient. `closure` computes the loss and the gradients; its
  // result is returned. The host does not wait for a device.
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::NoGradGuard no_grad;
    at::Tensor loss = {};
    if (closure != nullptr) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    for (auto& group : param_groups_) {
      for (at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) Update(parameter, OptionsIn(group));
      }
    }
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

 protected:
  // Updates a parameter. `state` is new in the first step: its tensors are then undefined.
  virtual void update(at::Tensor parameter, at::Tensor gradient, const Options& options,
                      State& state) const = 0;

 private:
  static const Options& OptionsIn(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }

  void Update(at::Tensor& parameter, const Options& options) {
    const at::Tensor& gradient = parameter.grad();
    constexpr bool kSparse = requires { Options::kSparse; };
    if (gradient.is_sparse() != kSparse) {
      throw ConfigurationError(std::string(Options::kName) + ": a gradient is " +
                               (kSparse ? "dense; give its parameter to another optimizer"
                                        : "sparse; make the layer with sparse(false)"));
    }
    auto& state = state_[parameter.unsafeGetTensorImpl()];
    if (state == nullptr) state = std::make_unique<State>();
    update(parameter, gradient, options, static_cast<State&>(*state));
  }
};

}  // namespace ddp::train::internal

#endif  // DDP_TRAIN_OPTIM_OPTIMIZER_OF_H_
