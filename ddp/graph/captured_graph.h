#ifndef DDP_GRAPH_CAPTURED_GRAPH_H_
#define DDP_GRAPH_CAPTURED_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace torch::jit {
struct Graph;
}  // namespace torch::jit

namespace ddp::internal {

using ScriptObject = c10::intrusive_ptr<c10::ivalue::Object>;

// A value of the module that a graph reads as an input.
struct StateInput {
  std::string name;    // of a parameter or buffer, else ""
  c10::IValue value;   // the value, where `owner` is null
  ScriptObject owner;  // the object whose attribute has the value now, else null
  size_t slot = 0;     // of the attribute

  c10::IValue Read() const { return owner ? owner->getSlot(slot) : value; }
};

// An attribute of a script whose value a graph has as a constant.
struct BakedAttribute {
  ScriptObject owner;
  size_t slot = 0;
  c10::IValue value;

  // Returns true while the attribute has the value that the graph was made for.
  bool Holds() const {
    const c10::IValue& now = owner->getSlot(slot);
    return now.tagKind() == value.tagKind() && (now.isNone() || now == value);
  }
};

// An attribute of a script that its code assigns.
struct AssignedAttribute {
  ScriptObject owner;
  size_t slot = 0;
};

// The forward of a module as one graph. Its first inputs are the arguments of forward; `arguments`
// is their number. One input for each element of `state` follows. The graph has no input `self`.
struct CapturedGraph {
  std::string name;  // of the module
  std::shared_ptr<torch::jit::Graph> graph;
  size_t arguments = 0;
  std::vector<StateInput> state;
  std::vector<BakedAttribute> baked;
  std::vector<AssignedAttribute> assigned;
  bool assigns_others = false;  // the code may also assign attributes that are not in `assigned`
};

// One parameter of a model, under the first of its names that is not in params_to_ignore.
struct ModelParameter {
  std::string name;
  at::Tensor tensor;
  bool excluded = false;  // all of its names are in params_to_ignore
  bool sparse = false;    // its gradient will be sparse

  // Returns true when the parameter is in no bucket now. requires_grad may change at any time.
  bool ignored() const { return excluded || !tensor.requires_grad(); }
};

}  // namespace ddp::internal

#endif  // DDP_GRAPH_CAPTURED_GRAPH_H_
