#include "ddp/reducer/unused_parameters.h"

#include <algorithm>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/container/flat_hash_set.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

using torch::autograd::Node;

bool ReachesAny(const std::vector<at::Tensor>& outputs,
                const std::vector<const Node*>& accumulators) {
  absl::flat_hash_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    // Only an accumulator is a leaf of the graph.
    if (node->next_edges().empty() &&
        std::binary_search(accumulators.begin(), accumulators.end(), node)) {
      return true;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return false;
}

Stranger FindStranger(const std::vector<at::Tensor>& unused, const std::vector<at::Tensor>& known) {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || GradientContext::running() != nullptr) return {};
  absl::flat_hash_set<const at::TensorImpl*> known_leaves;
  for (const at::Tensor& tensor : known) known_leaves.insert(tensor.unsafeGetTensorImpl());
  for (const Node* node : *nodes) {
    if (!node->next_edges().empty() || !node->post_hooks().empty()) continue;
    const auto* const accumulator = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (accumulator == nullptr) continue;
    const at::Tensor& leaf = accumulator->variable;
    if (known_leaves.contains(leaf.unsafeGetTensorImpl())) continue;
    const auto like = std::find_if(unused.begin(), unused.end(), [&](const at::Tensor& parameter) {
      return leaf.sizes() == parameter.sizes() && leaf.scalar_type() == parameter.scalar_type();
    });
    if (like != unused.end()) {
      return {.like = static_cast<int>(like - unused.begin()), .leaf = leaf};
    }
  }
  return {};
}

BackwardReach ReachOfBackward(const std::vector<const Node*>& accumulators) {
  if (const GradientContext* const context = GradientContext::running()) {
    BackwardReach reach;
    for (size_t i = 0; i < accumulators.size(); ++i) {
      if (!context->Reaches(accumulators[i])) reach.unreached.push_back(static_cast<int>(i));
    }
    return reach;
  }
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  BackwardReach reach{.unreached = {}, .limited = wanted != nullptr && !wanted->empty()};
  for (size_t i = 0; i < accumulators.size(); ++i) {
    if (nodes == nullptr || !nodes->contains(const_cast<Node*>(accumulators[i]))) {
      reach.unreached.push_back(static_cast<int>(i));
    }
  }
  return reach;
}

}  // namespace ddp::internal
