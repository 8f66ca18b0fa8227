#ifndef DDP_UNUSED_PARAMETERS_H_
#define DDP_UNUSED_PARAMETERS_H_

#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace ddp::internal {

// Returns whether a backward from `outputs` can reach one of `accumulators`, which are sorted by
// address. Searches the graph and stops at the first accumulator that it finds.
bool ReachesAny(const std::vector<at::Tensor>& outputs,
                const std::vector<const torch::autograd::Node*>& accumulators);

// The backward under way on this thread, as autograd knows it.
struct BackwardReach {
  // The indices of those `accumulators` that the backward cannot reach, ascending.
  std::vector<int> unreached;
  // The caller named the tensors that get gradients: autograd::grad(), or backward() with inputs.
  // Then not every accumulator that is reached gets a gradient.
  bool limited = false;
};

// Asks autograd, which has searched the graph of every backward before it runs it: one look-up per
// accumulator. Every accumulator counts as unreached when no backward is under way.
BackwardReach ReachOfBackward(const std::vector<const torch::autograd::Node*>& accumulators);

}  // namespace ddp::internal

#endif  // DDP_UNUSED_PARAMETERS_H_
