#ifndef DDP_REDUCER_CURRENT_BACKWARD_H_
#define DDP_REDUCER_CURRENT_BACKWARD_H_

#include <functional>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

// The backward whose hook or event runs on this thread: autograd's own, or that of the running
// GradientContext. A plain backward runs its hooks on the thread of these calls.

// Returns the backward's number; -1 outside of a backward.
inline int BackwardTask() {
  const GradientContext* const context = GradientContext::running();
  return context != nullptr ? context->task() : torch::autograd::get_current_graph_task_id();
}

// Runs `function` when the backward has ended well. After a failure, destroys it without a call.
inline void AtBackwardEnd(std::function<void()> function) {
  GradientContext* const context = GradientContext::running();
  if (context != nullptr) return context->AtEnd(std::move(function));
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(function));
}

// Calls `visit(node)` for each node of the backward's graph.
template <typename Visit>
void ForEachNodeOfBackward(const Visit& visit) {
  if (const GradientContext* const context = GradientContext::running()) {
    for (const torch::autograd::Node* node : context->nodes()) visit(*node);
    return;
  }
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (const torch::autograd::Node* node : *nodes) visit(*node);
}

}  // namespace ddp::internal

#endif  // DDP_REDUCER_CURRENT_BACKWARD_H_
