#ifndef DDP_REDUCER_UNUSED_PARAMETERS_H_
#define DDP_REDUCER_UNUSED_PARAMETERS_H_

#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace ddp::internal {

// Returns true when a backward from `outputs` can reach one of `accumulators`, which are sorted by
// address. Searches the graph, and stops at the first accumulator.
bool ReachesAny(const std::vector<at::Tensor>& outputs,
                const std::vector<const torch::autograd::Node*>& accumulators);

// The parameters that the current backward of this thread reaches, according to autograd.
struct BackwardReach {
  // The indices of the accumulators that the backward cannot reach, ascending.
  std::vector<int> unreached;
  // True when the caller named the tensors that get gradients: autograd::grad(), or backward() with
  // inputs. Then not every accumulator that is reached gets a gradient.
  bool limited = false;
};

// Returns the reach of the current backward. Costs one look-up per accumulator, because autograd
// has listed the nodes of the backward's graph already. Without a current backward, all
// accumulators are unreached.
BackwardReach ReachOfBackward(const std::vector<const torch::autograd::Node*>& accumulators);

// A leaf with a gradient in the current backward that is in no model's hands.
struct Stranger {
  int like = -1;    // of the same shape and type is this one of the unused parameters
  at::Tensor leaf;  // undefined: there is none
};

// Finds a leaf of the current backward that has no hook of a model, is none of `known`, and has the
// shape and type of one of `unused`. Where a member of a module was assigned another tensor, that
// tensor is such a leaf, and the parameter is unused. Looks at each node of the backward. Does not
// look into a distributed autograd context.
Stranger FindStranger(const std::vector<at::Tensor>& unused, const std::vector<at::Tensor>& known);

}  // namespace ddp::internal

#endif  // DDP_REDUCER_UNUSED_PARAMETERS_H_
