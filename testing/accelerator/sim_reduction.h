#ifndef DDP_TESTING_ACCELERATOR_SIM_REDUCTION_H_
#define DDP_TESTING_ACCELERATOR_SIM_REDUCTION_H_

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ddp::testing {

// A reduction as NCCL knows it, with the bits of ddp's own backends: ranks are combined in a
// balanced tree by their numbers, as (0+1)+(2+3).
class SimReduction {
 public:
  // Throws c10::Error for what NCCL refuses: BAND, BOR and BXOR; AVG of bools.
  SimReduction(const c10d::ReduceOp& op, const at::Tensor& tensor);

  // Returns the combination of the ranks' tensors, which it may overwrite. Runs on the stream's
  // thread.
  at::Tensor Combine(std::vector<at::Tensor> ranks) const;

 private:
  at::Tensor CombineTwo(const at::Tensor& a, const at::Tensor& b) const;

  c10d::ReduceOp::RedOpType type_;
  at::Tensor factor_;  // of PREMUL_SUM: a kernel's view
};

// Returns the elements of a contiguous `tensor` of a device, in one dimension, as kernels see them.
at::Tensor FlatKernelView(const at::Tensor& tensor);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_SIM_REDUCTION_H_
