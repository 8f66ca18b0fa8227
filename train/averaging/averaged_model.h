#ifndef DDP_TRAIN_AVERAGING_AVERAGED_MODEL_H_
#define DDP_TRAIN_AVERAGING_AVERAGED_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include "ddp/common/stateful.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::train {

struct AveragedModelOptions {
  // Unset: the mean of all models so far (SWA). Set: an exponential average (EMA), which keeps this
  // share of itself in each update; in [0, 1].
  std::optional<double> ema_decay = {};

  // An average of the program's own, instead: returns the new value of a tensor. `averaged`: the
  // updates before, at least 1. With ema_decay: an error.
  std::function<at::Tensor(const at::Tensor& average, const at::Tensor& current, int64_t averaged)>
      avg_fn = nullptr;

  // When true, floating-point buffers are averaged as well. When false, they are copied from the
  // model; see update_bn().
  bool use_buffers = false;

  // The device of the average; unset: that of the model.
  std::optional<at::Device> device = {};
};

// The average of a model, below, without its type.
class AveragedModelBase : public Stateful {
 public:
  // Takes the model's parameters into the average: the first time, as they are. Buffers of integers
  // are copied. Not a collective: after the optimizer's step, the ranks of data-parallel training
  // have equal parameters, and so equal averages. After a step() of a ZeroRedundancyOptimizer with
  // overlap_with_forward, call its wait() first.
  //
  // Throws ConfigurationError, and changes nothing, when the model has not the parameters and
  // buffers of the one in the constructor.
  void update_parameters(const torch::nn::Module& model);

  // The number of updates so far.
  int64_t n_averaged() const { return n_averaged_; }

  // The state has the parameters and buffers of the average, by name, and the number of updates.
  SavedState save_state() const override;
  void load_state(const SavedState& state) override;

 protected:
  // Throws ConfigurationError when ema_decay is out of range, or set beside avg_fn.
  AveragedModelBase(std::shared_ptr<torch::nn::Module> average, AveragedModelOptions options);

 private:
  void Average(const at::Tensor& average, const at::Tensor& current) const;

  const std::shared_ptr<torch::nn::Module> average_;
  const AveragedModelOptions options_;
  int64_t n_averaged_ = 0;
};

// The average of a model over the steps of a training: torch.optim.swa_utils.AveragedModel of
// PyTorch 2.15 (stochastic weight averaging: Izmailov et al., UAI 2018; or an exponential average).
//
//   train::AveragedModel ema(*net, {.ema_decay = 0.999});
//   ...
//   optimizer.step();
//   ema.update_parameters(*net);
//   ...
//   const auto outputs = ema.forward(inputs);
//
// The constructor copies the model by its clone(), so its class derives from torch::nn::Cloneable,
// as LibTorch's layers and containers do; clone() throws c10::Error otherwise. Under a
// DistributedDataParallel, give it the bare module. Thread-compatible.
template <typename Module>
class AveragedModel final : public AveragedModelBase {
 public:
  explicit AveragedModel(const Module& model, AveragedModelOptions options = {})
      : AveragedModel(std::dynamic_pointer_cast<Module>(model.clone(options.device)), options) {}

  // The average as a module, for evaluation and for saving. The caller shares ownership.
  const std::shared_ptr<Module>& module() const { return module_; }

  template <typename... Inputs>
  auto forward(Inputs&&... inputs) {
    return module_->forward(std::forward<Inputs>(inputs)...);
  }

 private:
  AveragedModel(std::shared_ptr<Module> copy, AveragedModelOptions options)
      : AveragedModelBase(copy, std::move(options)), module_(std::move(copy)) {}

  const std::shared_ptr<Module> module_;
};

// Computes the running statistics of a model's BatchNorm layers anew, those of SyncBatchNorm
// included, as the mean over the batches of its data. An average of parameters needs it, since its
// layers never saw their own outputs.
//
// `forward_next`: runs the forward of the next batch, and returns false, without a forward, when
// there is no further one. The model is in training mode meanwhile, without gradients; its mode and
// the layers' momenta come back afterwards, also after an exception of forward_next.
//
// `group`: when set, the ranks have different batches, and each layer gets the mean over those of
// all ranks: what one rank with all batches would have computed. Collective then: every rank calls
// it, also one without a batch. Throws what a collective throws.
void update_bn(torch::nn::Module& model, const std::function<bool()>& forward_next,
               const std::shared_ptr<ProcessGroup>& group = nullptr);

}  // namespace ddp::train

#endif  // DDP_TRAIN_AVERAGING_AVERAGED_MODEL_H_
