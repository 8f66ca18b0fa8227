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

}  // namespace ddp::internal

#endif  // DDP_REDUCER_UNUSED_PARAMETERS_H_
