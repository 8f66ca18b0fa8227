#ifndef DDP_RPC_GRAPH_WALK_H_
#define DDP_RPC_GRAPH_WALK_H_

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/container/flat_hash_set.h"

namespace ddp::rpc::internal {

// The nodes of autograd's graph that a backward from some roots reaches on this worker.
// Thread-compatible. Holds plain pointers: the roots keep the graph.
class GraphWalk {
 public:
  using Node = torch::autograd::Node;

  void AddRoot(const at::Tensor& root) {
    if (root.requires_grad()) Visit(torch::autograd::impl::gradient_edge(root).function.get());
    Follow();
  }
  void AddRoot(const Node* root) {
    Visit(root);
    Follow();
  }

  bool Reaches(const void* node) const { return seen_.contains(static_cast<const Node*>(node)); }
  const std::vector<const Node*>& nodes() const { return nodes_; }

 private:
  void Visit(const Node* node) {
    if (node != nullptr && seen_.insert(node).second) nodes_.push_back(node);
  }

  void Follow() {
    for (; next_ < nodes_.size(); ++next_) {
      const Node* const node = nodes_[next_];
      for (const torch::autograd::Edge& edge : node->next_edges()) Visit(edge.function.get());
    }
  }

  absl::flat_hash_set<const Node*> seen_;
  std::vector<const Node*> nodes_;  // in the order of the search
  size_t next_ = 0;
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_GRAPH_WALK_H_
