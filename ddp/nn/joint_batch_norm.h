#ifndef DDP_NN_JOINT_BATCH_NORM_H_
#define DDP_NN_JOINT_BATCH_NORM_H_

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "ddp/process_group/model_group.h"

// The arithmetic of SyncBatchNorm and of a converted BatchNorm. sync_batch_norm.cc implements it.
namespace ddp::internal {

// The arguments of one batch norm in training.
struct BatchNormCall {
  at::Tensor input;         // [N, C, ...], of a floating type; N may be 0
  at::Tensor weight;        // [C], or undefined
  at::Tensor bias;          // [C], or undefined
  at::Tensor running_mean;  // [C], or undefined; changed in place, as is running_var
  at::Tensor running_var;
  // The share of this batch in the new running statistics. Unset: the running statistics become the
  // average over all batches that num_batches_tracked counts. Unset without num_batches_tracked: 0.
  std::optional<double> momentum;
  at::Tensor num_batches_tracked;  // a number, or undefined; the batch is added
  double eps = 1e-5;
};

// Normalizes the input by mean and variance of the joint batch of all ranks. `group`: of the
// layer's own; null: that of the model whose forward runs. Returns a tensor like the input.
//
// Collective: one all-reduce here. When some rank needs the gradient of its input, the backward has
// one more all-reduce, on every rank. In a group of one rank this is LibTorch's batch norm.
//
// The numbers of half and bfloat16 are computed in float, and those of the merge over ranks in
// double. The host waits for the statistics, also on a GPU.
//
// Within a StatisticsReplay, the running statistics and num_batches_tracked do not change.
//
// A joint batch without any value gives an empty output and changes neither the running statistics
// nor num_batches_tracked. A batch counts after its all-reduce is complete, so a batch whose
// all-reduce fails does not count.
//
// Throws ConfigurationError when the joint batch has one value in each channel. Throws as
// StatisticsRanks does. The backward throws ConfigurationError when it is derived a second time.
at::Tensor JointBatchNorm(const BatchNormCall& call, const std::shared_ptr<ModelGroup>& group);

// Runs LibTorch's batch norm, without a collective. `training`: normalizes by the statistics of
// this rank's batch, not by the running statistics.
at::Tensor LocalBatchNorm(const BatchNormCall& call, bool training);

}  // namespace ddp::internal

#endif  // DDP_NN_JOINT_BATCH_NORM_H_
