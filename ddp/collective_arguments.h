#ifndef DDP_COLLECTIVE_ARGUMENTS_H_
#define DDP_COLLECTIVE_ARGUMENTS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/collective.h"
#include "ddp/reduce_op.h"

namespace ddp::internal {

// The rank that calls a collective, for checks and messages.
struct CollectiveCaller {
  int rank = 0;
  int size = 1;
  std::optional<at::Device> device = {};  // where tensors must lie; nullopt: anywhere
  std::string backend = {};               // "gloo", "nccl", or another one
};

// A collective of a program as a communicator takes it: on contiguous tensors that do not overlap.
// A tensor that is not contiguous, or that overlaps an output, is replaced by a copy.
struct PreparedCollective {
  Collective collective;
  // Writes the result into the program's tensors and divides an average. Null: nothing is to do.
  std::function<void()> finish;
  std::vector<at::Tensor> outputs;  // the program's tensors that are written
};

// A list of tensors stands for their elements in order.
//
// All throw ConfigurationError, which names the rank and the collective, where a tensor is
// undefined, sparse (but in an all-reduce), of another type or device than the first one, to be
// written and comes from expand(); where the type or the backend lacks the operation, sizes do
// not fit, or there is no such rank. Gradients are not tracked.
PreparedCollective PrepareAllReduce(const CollectiveCaller& caller, const at::Tensor& tensor,
                                    ReduceOp op);
PreparedCollective PrepareBroadcast(const CollectiveCaller& caller, const at::Tensor& tensor,
                                    int root);

// `outputs`: one tensor, or one for each rank.
PreparedCollective PrepareAllGather(const CollectiveCaller& caller,
                                    const std::vector<at::Tensor>& outputs,
                                    const at::Tensor& input);

// `inputs`: one tensor, or one for each rank.
PreparedCollective PrepareReduceScatter(const CollectiveCaller& caller, const at::Tensor& output,
                                        const std::vector<at::Tensor>& inputs, ReduceOp op);

// A part for each rank along the first dimension, all of one size.
PreparedCollective PrepareAllToAll(const CollectiveCaller& caller, const at::Tensor& output,
                                   const at::Tensor& input);

// A tensor, of any size, for each rank.
PreparedCollective PrepareAllToAllSized(const CollectiveCaller& caller,
                                        const std::vector<at::Tensor>& outputs,
                                        const std::vector<at::Tensor>& inputs);

// One half of a message between this rank and `peer`: the tensor is the collective's output.
PreparedCollective PrepareSend(const CollectiveCaller& caller, const at::Tensor& tensor, int peer,
                               int tag);
PreparedCollective PrepareReceive(const CollectiveCaller& caller, const at::Tensor& tensor,
                                  int peer, int tag);

// The parts of `tensor` along its first dimension that `sizes` names, one for each rank.
std::vector<at::Tensor> SplitForRanks(const CollectiveCaller& caller, const at::Tensor& tensor,
                                      const std::vector<int64_t>& sizes);

}  // namespace ddp::internal

#endif  // DDP_COLLECTIVE_ARGUMENTS_H_
