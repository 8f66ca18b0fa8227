#ifndef DDP_GRAPH_SCRIPT_CAPTURE_H_
#define DDP_GRAPH_SCRIPT_CAPTURE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

namespace torch::jit {
struct Graph;
struct Module;
}  // namespace torch::jit

namespace ddp::internal {

using ScriptObject = c10::intrusive_ptr<c10::ivalue::Object>;

// An attribute of a script's object.
struct ScriptAttribute {
  ScriptObject owner;
  size_t slot = 0;

  const c10::IValue& Value() const { return owner->getSlot(slot); }
  bool operator==(const ScriptAttribute&) const = default;
  void Set(c10::IValue value) const { owner->setSlot(slot, std::move(value)); }
};

// A value of the module that a graph reads as an input.
struct StateInput {
  std::string name;           // of a parameter or buffer, else ""
  c10::IValue value;          // where `attribute` has no owner
  ScriptAttribute attribute;  // whose value is read in every run

  const c10::IValue& Read() const { return attribute.owner ? attribute.Value() : value; }
};

// An attribute whose value a graph has as a constant.
struct BakedAttribute {
  ScriptAttribute attribute;
  c10::IValue value;

  // Returns true while the attribute has the value that the graph was made for.
  bool Holds() const {
    const c10::IValue& now = attribute.Value();
    return now.tagKind() == value.tagKind() && (now.isNone() || now == value);
  }
};

// The forward of a script as one graph. Its first inputs are the arguments of forward; `arguments`
// is their number. One input for each element of `state` follows. The graph has no input `self`.
struct CapturedGraph {
  std::string name;  // of the module
  std::shared_ptr<torch::jit::Graph> graph;
  size_t arguments = 0;
  std::vector<StateInput> state;
  std::vector<BakedAttribute> baked;
  std::vector<ScriptAttribute> assigned;  // attributes that the code assigns
  bool assigns_others = false;  // the code may also assign attributes that are not in `assigned`
};

// Returns the name of the module's type.
std::string NameOf(const torch::jit::Module& module);

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
