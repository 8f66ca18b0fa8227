#ifndef DDP_OPTIM_SHARDED_PARAMETERS_H_
#define DDP_OPTIM_SHARDED_PARAMETERS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "ddp/optim/shard_plan.h"

namespace torch::optim {
class OptimizerParamGroup;
}  // namespace torch::optim

namespace ddp::internal {

// Returns elements [begin, end) of a tensor without gaps as one row, in the order of its memory.
at::Tensor FlatView(const at::Tensor& dense, int64_t begin, int64_t end);

// Returns the elements of `tensor` that the piece names: its parameter, or a tensor of the same
// shape and strides. One row, or the tensor in its shape where the piece is whole. Shares the
// tensor's memory.
at::Tensor PieceOf(const at::Tensor& tensor, const ShardPlan::Piece& piece);

// The parameters of a ZeroRedundancyOptimizer, and the views of them that this rank's optimizer
// updates. Keeps the parameters' tensors. Thread-compatible.
class ShardedParameters {
 public:
  // A part of one parameter that this rank updates.
  struct Mine {
    int bucket = 0;
    ShardPlan::Piece piece;
    int group = 0;    // of the parameter
    at::Tensor view;  // PieceOf() the parameter. The tensor object never changes.
  };

  ShardedParameters(const ShardPlan::Options& options, int rank);

  // Adds parameter groups. Returns the numbers of the new elements of mine().
  std::vector<size_t> Add(const std::vector<std::vector<at::Tensor>>& groups);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const ShardPlan& plan() const { return plan_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const std::vector<Mine>& mine() const { return mine_; }

  // Returns true when `groups` have the parameters of Add(), in the same order.
  bool HasGroups(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  // Returns the first parameter whose type, device, shape or strides have changed; -1: none.
  int FindChanged() const;
  // Returns the first parameter whose gradient cannot be used: it is sparse, or has another shape,
  // type or device than the parameter; -1: none.
  int FindUnusableGradient() const;

  // Makes the views follow parameters that have new memory, as after set_data(). Call it only while
  // FindChanged() returns -1.
  void FollowMemory();

  // Returns the gradient of a piece, as PieceOf(); undefined where the parameter has none.
  at::Tensor GradientOf(const ShardPlan::Piece& piece) const;
  // Sets the views' gradients to this rank's parts, or to `instead`, by mine().
  void TakeGradients();
  void TakeGradients(const std::vector<at::Tensor>& instead);
  void DropGradients();

  // Returns for each bucket whether some parameter of it has a gradient.
  std::vector<bool> BucketsWithGradients() const;

 private:
  // The properties of a parameter that must not change.
  struct Form {
    at::ScalarType type;
    at::Device device;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;

    bool Fits(const at::Tensor& tensor) const;
  };

  static Form FormOf(const at::Tensor& tensor);
  ShardPlan::Tensor Property(const at::Tensor& tensor);

  const int ranks_;
  const int rank_;
  ShardPlan plan_;
  std::vector<at::Tensor> tensors_;
  std::vector<int> groups_;  // by parameter
  int group_count_ = 0;
  std::vector<Form> forms_;           // by parameter
  std::map<std::string, int> kinds_;  // the numbers of types, devices and trainability
  std::vector<Mine> mine_;
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_SHARDED_PARAMETERS_H_
