#ifndef DDP_UNUSED_PARAMETERS_H_
#define DDP_UNUSED_PARAMETERS_H_

#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace ddp {

// The indices of those gradient accumulators that no backward from `outputs` can reach: parameters
// that this forward did not use. A search of the whole graph, O(its edges). Ascending.
std::vector<int> FindUnused(const std::vector<at::Tensor>& outputs,
                            const std::vector<torch::autograd::Node*>& accumulators);

}  // namespace ddp

#endif  // DDP_UNUSED_PARAMETERS_H_
