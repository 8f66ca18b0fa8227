// The differences in autograd's nodes between the supported versions of LibTorch, 2.11 to 2.15.
//
// Each difference is detected from LibTorch's own declarations, not from its version number, so
// that a version between two known ones works as well. Include this header only in .cc files that
// also include torch/csrc/autograd/function.h, which defines Node: an Edge needs the definition.
#ifndef DDP_COMMON_TORCH_VERSIONS_H_
#define DDP_COMMON_TORCH_VERSIONS_H_

#include <memory>
#include <type_traits>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

namespace ddp::torch_versions {

// The pointer that owns an autograd node: std::shared_ptr in LibTorch 2.11, c10::intrusive_ptr in
// later versions.
using NodePtr = decltype(torch::autograd::Edge::function);

inline constexpr bool kNodesAreIntrusive =
    std::is_same_v<NodePtr, c10::intrusive_ptr<torch::autograd::Node>>;

// Makes a node on the heap, of a type derived from Node.
template <typename NodeType, typename... Arguments>
auto MakeNode(Arguments&&... arguments) {
  if constexpr (kNodesAreIntrusive) {
    return c10::make_intrusive<NodeType>(std::forward<Arguments>(arguments)...);
  } else {
    return std::make_shared<NodeType>(std::forward<Arguments>(arguments)...);
  }
}

// Returns the weak pointer to `node` that torch::autograd::impl::set_grad_accumulator() takes.
inline std::weak_ptr<torch::autograd::Node> WeakNode(
    const std::shared_ptr<torch::autograd::Node>& node) {
  return node;
}
template <typename NodeType>
c10::weak_intrusive_ptr<NodeType> WeakNode(const c10::intrusive_ptr<NodeType>& node) {
  return c10::weak_intrusive_ptr<NodeType>(node);
}

}  // namespace ddp::torch_versions

#endif  // DDP_COMMON_TORCH_VERSIONS_H_
