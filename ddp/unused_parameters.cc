#include "ddp/unused_parameters.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/container/flat_hash_set.h"

namespace ddp {

std::vector<int> FindUnused(const std::vector<at::Tensor>& outputs,
                            const std::vector<torch::autograd::Node*>& accumulators) {
  absl::flat_hash_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> open;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!open.empty()) {
    const torch::autograd::Node* node = open.back();
    open.pop_back();
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<int> unused;
  for (size_t i = 0; i < accumulators.size(); ++i) {
    if (!seen.contains(accumulators[i])) unused.push_back(static_cast<int>(i));
  }
  return unused;
}

}  // namespace ddp
