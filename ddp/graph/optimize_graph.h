// optimize_graph: runs a TorchScript module as a graph, cut into pieces whose gradients are
// buckets, so that the reduction of the first buckets overlaps the rest of the backward.
//
//   auto graph = ddp::optimize_graph(torch::jit::load("model.pt"), {.bucket_cap_mb = 4});
//   std::cout << graph->describe();
//   ddp::DistributedDataParallel model(graph, group, {.bucket_layout = graph->bucket_layout()});
//
// The result is a torch::nn::Module that shares its parameters, buffers and modes with the script,
// and has the same names. docs/graph.md says what a graph can hold.
#ifndef DDP_GRAPH_OPTIMIZE_GRAPH_H_
#define DDP_GRAPH_OPTIMIZE_GRAPH_H_

#include <concepts>
#include <memory>
#include <type_traits>

#include <torch/nn/module.h>

#include "ddp/graph/graph_options.h"
#include "ddp/graph/script_module.h"

namespace ddp {

// Returns the script as a graph in pieces. Throws ConfigurationError for options that are not
// usable, for a module without a forward or without parameters, and for one with hooks, sparse
// embeddings, SyncBatchNorm layers or autocast blocks, or whose code assigns a parameter.
std::shared_ptr<ScriptGraphModule> optimize_graph(const torch::jit::Module& script,
                                                  const GraphOptions& options = {});

namespace internal {

template <typename T>
concept EagerModule = std::derived_from<std::remove_cvref_t<T>, torch::nn::Module>;

// True for a module written in C++, for a pointer to one, and for a holder that TORCH_MODULE made.
template <typename T>
concept OwnsEagerModule = EagerModule<T> || requires(const T& owner) {
  { *owner } -> EagerModule;
};

}  // namespace internal

// Does not compile: a module written in C++ has no graph to cut, and needs none.
template <internal::OwnsEagerModule Module, typename... Examples>
std::shared_ptr<ScriptGraphModule> optimize_graph(const Module&, const GraphOptions& = {},
                                                  const Examples&...) {
  static_assert(sizeof(Module) == 0,
                "optimize_graph() takes a torch::jit::Module. Give a module written in C++ to "
                "DistributedDataParallel itself: its backward overlaps the reduction already");
  return nullptr;
}

}  // namespace ddp

#endif  // DDP_GRAPH_OPTIMIZE_GRAPH_H_
