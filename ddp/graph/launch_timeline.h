// How much of a backward has run when an optimized module's first bucket is reduced.
#ifndef DDP_GRAPH_LAUNCH_TIMELINE_H_
#define DDP_GRAPH_LAUNCH_TIMELINE_H_

#include <torch/nn.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/graph/test_models.h"

namespace ddp::testing {

// Calls visit(node) once for each node of the backward of `loss` that computes: not for those that
// store the gradient of a parameter.
inline void ForEachBackwardNode(const torch::Tensor& loss,
                                const std::function<void(torch::autograd::Node&)>& visit) {
  std::vector<torch::autograd::Node*> waiting = {loss.grad_fn().get()};
  std::set<torch::autograd::Node*> seen;
  while (!waiting.empty()) {
    torch::autograd::Node* node = waiting.back();
    waiting.pop_back();
    if (node == nullptr || node->num_outputs() == 0 || !seen.insert(node).second) continue;
    visit(*node);
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      waiting.push_back(edge.function.get());
    }
  }
}

// The events of one backward, counted.
struct Timeline {
  int buckets = 0;
  int gradients = 0;
  int gradients_at_first_launch = -1;
  int backward_nodes = 0;  // of the whole backward
  int nodes_run = 0;
  int nodes_at_first_launch = -1;
};

// Counts a backward node that has run.
struct CountRun final : torch::autograd::FunctionPostHook {
  explicit CountRun(std::shared_ptr<Timeline> timeline) : timeline(std::move(timeline)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    ++timeline->nodes_run;
    return outputs;
  }
  const std::shared_ptr<Timeline> timeline;
};

// Trains ten layers under DistributedDataParallel. Returns the timeline of the last step.
inline Timeline LaunchesOf(const std::shared_ptr<ProcessGroup>& group,
                           const GraphOptions& options) {
  torch::manual_seed(1);
  JitModule net = NewScript("Layers");
  std::string code = "def forward(self, x):\n";
  for (int i = 0; i < 10; ++i) {
    const std::string name = "layer" + std::to_string(i);
    AddLinear(net, name, 32, 32);
    code +=
        "    x = torch.relu(torch.linear(x, self." + name + ".weight, self." + name + ".bias))\n";
  }
  net.define(code + "    return x\n");
  const auto graph = optimize_graph(net, options);
  DistributedDataParallel model(graph, group, {.bucket_layout = graph->bucket_layout()});
  auto timeline = std::make_shared<Timeline>();
  // The hooks of leaves run when their gradients are computed.
  for (const torch::Tensor& parameter : model->parameters()) {
    parameter.register_hook([timeline](const torch::Tensor& gradient) {
      ++timeline->gradients;
      return gradient;
    });
  }
  model.register_comm_hook(group,
                           [timeline](std::shared_ptr<ProcessGroup>& all, GradBucket& bucket) {
                             if (timeline->buckets++ == 0) {
                               timeline->gradients_at_first_launch = timeline->gradients;
                               timeline->nodes_at_first_launch = timeline->nodes_run;
                             }
                             return allreduce_hook(all, bucket);
                           });
  for (int step = 0; step < 4; ++step) {
    *timeline = {};
    model.zero_grad();
    const torch::Tensor loss = model.forward(torch::ones({4, 32})).toTensor().sum();
    ForEachBackwardNode(loss, [&](torch::autograd::Node& node) {
      ++timeline->backward_nodes;
      node.add_post_hook(std::make_unique<CountRun>(timeline));
    });
    loss.backward();
  }
  return *timeline;
}

}  // namespace ddp::testing

#endif  // DDP_GRAPH_LAUNCH_TIMELINE_H_
