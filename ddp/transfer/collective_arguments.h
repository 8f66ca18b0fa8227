#ifndef DDP_TRANSFER_COLLECTIVE_ARGUMENTS_H_
#define DDP_TRANSFER_COLLECTIVE_ARGUMENTS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/collective.h"
#include "ddp/common/reduce_op.h"

namespace ddp::internal {

// The rank that calls a collective; for checks and messages.
struct CollectiveCaller {
  int rank = 0;
  int size = 1;
  std::optional<at::Device> device = {};  // required device of the tensors; nullopt: any
  // See BackendTraits::refusal.
  std::string (*refusal)(ReduceOp op, at::ScalarType type) = nullptr;
};

// A program's collective in the form that a communicator needs: the input and the output are one
// contiguous tensor each and do not overlap. (An all-reduce may have a sparse one.) Tensors that
// are not one contiguous block are copied into one; so is an input that overlaps the output.
struct PreparedCollective {
  Collective collective;
  // Writes the result into the program's tensors and divides an average. Null: no such step is
  // needed.
  std::function<void()> finish;
  std::vector<at::Tensor> outputs;  // the program's tensors to be written
};

// The functions below check a call's arguments and prepare it. A list of tensors is treated as one
// sequence of its elements. Gradients are not tracked.
//
// All throw ConfigurationError, which names the rank and the collective, when:
// - a tensor is undefined, sparse (except in an all-reduce), or differs from the first one in type
//   or device;
// - a tensor to be written comes from expand();
// - the type or the backend does not support the operation;
// - sizes do not fit, or there is no such rank.
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

// Parts lie along the first dimension, one for each rank, all of one size.
PreparedCollective PrepareAllToAll(const CollectiveCaller& caller, const at::Tensor& output,
                                   const at::Tensor& input);

// One tensor for each rank, of any size.
PreparedCollective PrepareAllToAllSized(const CollectiveCaller& caller,
                                        const std::vector<at::Tensor>& outputs,
                                        const std::vector<at::Tensor>& inputs);

// One half of a message between this rank and `peer`; the tensor is the output of the collective.
PreparedCollective PrepareSend(const CollectiveCaller& caller, const at::Tensor& tensor, int peer,
                               int tag);
PreparedCollective PrepareReceive(const CollectiveCaller& caller, const at::Tensor& tensor,
                                  int peer, int tag);

// Tells autograd that the call of `rank` is about to write its outputs: a later backward that needs
// their old values throws, as after any other operation in place.
void MarkWritten(const PreparedCollective& prepared, int rank);

// Splits `tensor` along its first dimension into parts of the given sizes, one for each rank.
std::vector<at::Tensor> SplitForRanks(const CollectiveCaller& caller, const at::Tensor& tensor,
                                      const std::vector<int64_t>& sizes);

}  // namespace ddp::internal

#endif  // DDP_TRANSFER_COLLECTIVE_ARGUMENTS_H_
