// Batch normalization over the batches of all ranks together.
//
//   struct NetImpl : torch::nn::Module {
//     NetImpl() { register_module("norm", norm); ... }
//     ddp::SyncBatchNorm2d norm{64};
//   };
//
// In training the layer normalizes by mean and variance of the joint batch, so a model on several
// ranks computes what one rank would compute on all samples. In eval() it is LibTorch's batch norm.
// docs/sync-batch-norm.md tells when to use it. To give a finished model such layers, call
// convert_sync_batchnorm() (ddp/nn/convert_sync_batchnorm.h).
#ifndef DDP_NN_SYNC_BATCH_NORM_H_
#define DDP_NN_SYNC_BATCH_NORM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <utility>

#include <torch/nn/modules/batchnorm.h>

#include "ddp/statistics/statistics_layers.h"

namespace ddp {

class ProcessGroup;

namespace internal {

// Returns a ModelGroup over `group`; null for null.
std::shared_ptr<ModelGroup> ModelGroupOf(std::shared_ptr<ProcessGroup> group);

// A layer's state in one forward.
struct SyncBatchNormState {
  const torch::nn::BatchNormOptions& options;
  bool training;
  const at::Tensor& weight;
  const at::Tensor& bias;
  const at::Tensor& running_mean;
  const at::Tensor& running_var;
  const at::Tensor& num_batches_tracked;
  const std::shared_ptr<ModelGroup>& group;
};
void CheckInput(const at::Tensor& input, size_t dimensions, int64_t channels);
at::Tensor RunSyncBatchNorm(const at::Tensor& input, const SyncBatchNormState& state);
void PrintSyncBatchNorm(std::ostream& stream, size_t dimensions,
                        const torch::nn::BatchNormOptions& options);

}  // namespace internal

// The part that the three layers share. Parameters, buffers, their names and the options are those
// of LibTorch's BatchNorm, so the two can load each other's state.
//
// Ranks may have batches of different sizes, of one sample or of none. The joint batch counts:
// - forward() throws ConfigurationError when the joint batch has one value in each channel.
// - The running variance is the unbiased one of the joint batch.
// - With options.momentum unset, the running statistics are the average over all batches. A joint
//   batch without values does not count.
//
// Collectives. In train(), forward() is one all-reduce over the ranks, also under NoGradGuard and
// no_sync(). The backward has one more, when some rank needs the gradient of the layer's input. All
// ranks must run the same layers in the same order, forward and backward. On a GPU the host waits
// for the forward's all-reduce.
//
// The ranks are those of the group given to the constructor. Without one they are those of the
// DistributedDataParallel whose forward runs the layer; construct the wrapper after the layer.
// A group of the layer's own has some of the model's ranks, and cannot be used under a Join.
//
// forward() also throws ConfigurationError when there is no group, or the input has another
// shape than [N, C, ...] with the layer's channels. It throws what a collective throws. Second
// derivatives throw ConfigurationError.
//
// Thread-compatible.
template <size_t D, typename Derived>
class SyncBatchNormImplBase : public torch::nn::BatchNormImplBase<D, Derived>,
                              public internal::StatisticsModule {
 public:
  explicit SyncBatchNormImplBase(const torch::nn::BatchNormOptions& options,
                                 std::shared_ptr<ProcessGroup> group = nullptr)
      : torch::nn::BatchNormImplBase<D, Derived>(options),
        group_(internal::ModelGroupOf(std::move(group))) {}

  at::Tensor forward(const at::Tensor& input) {
    this->_check_input_dim(input);
    return internal::RunSyncBatchNorm(input, {.options = this->options,
                                              .training = this->is_training(),
                                              .weight = this->weight,
                                              .bias = this->bias,
                                              .running_mean = this->running_mean,
                                              .running_var = this->running_var,
                                              .num_batches_tracked = this->num_batches_tracked,
                                              .group = group_});
  }

  void pretty_print(std::ostream& stream) const override {
    internal::PrintSyncBatchNorm(stream, D, this->options);
  }

  std::shared_ptr<internal::ModelGroup> statistics_group() const override { return group_; }

 protected:
  void _check_input_dim(const at::Tensor& input) override {
    internal::CheckInput(input, D, this->options.num_features());
  }

 private:
  std::shared_ptr<internal::ModelGroup> group_;
};

// Takes inputs of the shape [N, C] or [N, C, L].
class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>::SyncBatchNormImplBase;
};

// Takes inputs of the shape [N, C, H, W], with any strides; keeps channels_last.
class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>::SyncBatchNormImplBase;
};

// Takes inputs of the shape [N, C, D, H, W], with any strides.
class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>::SyncBatchNormImplBase;
};

// The holders: ddp::SyncBatchNorm2d norm(64), or norm(torch::nn::BatchNormOptions(64), group).
TORCH_MODULE(SyncBatchNorm1d);
TORCH_MODULE(SyncBatchNorm2d);
TORCH_MODULE(SyncBatchNorm3d);

}  // namespace ddp

#endif  // DDP_NN_SYNC_BATCH_NORM_H_
