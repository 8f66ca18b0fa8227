#ifndef DDP_GRAPH_SCRIPT_CAPTURE_H_
#define DDP_GRAPH_SCRIPT_CAPTURE_H_

#include "ddp/graph/captured_graph.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace ddp::internal {

// Returns the code of the module's forward as one graph, without calls. Runs no operation.
//
// - Numbers, flags, strings and None in attributes become constants, so `if self.training` costs
//   nothing. CapturedGraph::baked lists these attributes: capture again when one has changed.
// - Other attributes become inputs, which are read in every run.
// - An attribute that the code assigns stays an attribute: the graph reads and writes it in the
//   module's object, so the module has the assigned value also when a later operation throws.
//   CapturedGraph::assigned lists these attributes.
//
// Throws ConfigurationError for code with an autocast block of its own, whose casts a graph would
// lose.
CapturedGraph CaptureScript(const torch::jit::Module& module);

}  // namespace ddp::internal

#endif  // DDP_GRAPH_SCRIPT_CAPTURE_H_
