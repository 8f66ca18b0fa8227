#include "ddp/graph/script_capture.h"

#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/attributes.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/peephole.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

namespace jit = torch::jit;

// Calls visit(node) for each node of the block and of the blocks in it. The visit may destroy the
// node.
template <typename Visit>
void ForEachNode(jit::Block* block, const Visit& visit) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    jit::Node* node = *it++;
    for (jit::Block* inner : node->blocks()) ForEachNode(inner, visit);
    visit(node);
  }
}

bool IsConstantKind(const c10::IValue& value) {
  return value.isNone() || value.isBool() || value.isInt() || value.isDouble() ||
         value.isString() || value.isDevice();
}

// True for torch.autocast and torch.cuda.amp.autocast of Python.
bool IsAutocast(const c10::Type& type) {
  const auto* object = type.castRaw<c10::ClassType>();
  if (object == nullptr || !object->name().has_value()) return false;
  return object->name()->name() == "autocast" &&
         object->name()->prefix().find("autocast_mode") != std::string::npos;
}

// TorchScript casts in an optimisation of its own, which the executor of a graph does not run.
void RefuseAutocastBlocks(const std::string& name, jit::Graph& graph) {
  ForEachNode(graph.block(), [&](const jit::Node* node) {
    if (node->kind() != c10::prim::Enter || !IsAutocast(*node->input(0)->type())) return;
    throw ConfigurationError(
        absl::StrCat("the forward of ", name,
                     " has an autocast block, whose casts a graph would lose; remove it from the "
                     "script and enable autocast around the forward in the program, or train the "
                     "script without optimize_graph()"));
  });
}

// True for code that is not part of the graph itself: a method of an interface, a forked function.
bool HidesCode(const jit::Node& node) {
  return node.kind() == c10::prim::CallMethod || node.hasAttribute(c10::attr::Subgraph);
}

// Takes the module's object out of a graph.
class Lowering {
 public:
  Lowering(const jit::Module& module, CapturedGraph& captured)
      : module_(module), captured_(captured), graph_(*captured.graph) {
    for (const auto& item : module.named_parameters()) Name(item.value, item.name);
    for (const auto& item : module.named_buffers()) Name(item.value, item.name);
  }

  void Run() {
    objects_[graph_.inputs()[0]] = module_._ivalue();
    FindObjects(graph_.block());
    FindAssigned();
    ForEachNode(graph_.block(), [this](jit::Node* node) { Lower(node); });
    // Objects that remain in use: attributes that the code assigns, and calls of interfaces.
    for (jit::Value* value : object_values_) {
      if (value->hasUses()) value->replaceAllUsesWith(ObjectInput(objects_.at(value)));
    }
    jit::Value* self = graph_.inputs()[0];
    if (self->hasUses()) self->replaceAllUsesWith(ObjectInput(module_._ivalue()));
    graph_.eraseInput(0);
  }

 private:
  using Attribute = std::pair<const c10::ivalue::Object*, size_t>;

  void Name(const at::Tensor& tensor, const std::string& name) {
    if (tensor.defined()) names_.try_emplace(tensor.unsafeGetTensorImpl(), name);
  }

  // Returns the object that is the input of a GetAttr or SetAttr, where it is known.
  ScriptObject OwnerOf(const jit::Node* node) const {
    const auto it = objects_.find(node->input(0));
    return it == objects_.end() ? nullptr : it->second;
  }

  static size_t SlotOf(const ScriptObject& owner, const jit::Node* node) {
    return owner->type()->getAttributeSlot(node->s(c10::attr::name));
  }

  // Values are known before they are read, so nodes are visited in order, outer nodes first.
  void FindObjects(jit::Block* block) {
    for (jit::Node* node : block->nodes()) {
      if (node->kind() == c10::prim::GetAttr) {
        const ScriptObject owner = OwnerOf(node);
        if (owner == nullptr) continue;
        const size_t slot = SlotOf(owner, node);
        if (!owner->type()->getAttribute(slot)->is_module()) continue;  // others can be assigned
        const c10::IValue& value = owner->getSlot(slot);
        if (!value.isObject()) continue;
        objects_[node->output()] = value.toObject();
        object_values_.push_back(node->output());
      }
      for (jit::Block* inner : node->blocks()) FindObjects(inner);
    }
  }

  void FindAssigned() {
    ForEachNode(graph_.block(), [this](jit::Node* node) {
      captured_.assigns_others = captured_.assigns_others || HidesCode(*node);
      if (node->kind() != c10::prim::SetAttr) return;
      const ScriptObject owner = OwnerOf(node);
      if (owner != nullptr) {
        const size_t slot = SlotOf(owner, node);
        if (assigned_.insert({owner.get(), slot}).second) {
          captured_.assigned.push_back({owner, slot});
        }
      } else {
        captured_.assigns_others = true;
        assigned_names_.insert(node->s(c10::attr::name));  // of any object
      }
    });
  }

  void Lower(jit::Node* node) {
    if (node->kind() != c10::prim::GetAttr || objects_.count(node->output()) != 0) return;
    const ScriptObject owner = OwnerOf(node);
    if (owner == nullptr) return;
    const size_t slot = SlotOf(owner, node);
    if (assigned_.count({owner.get(), slot}) != 0) return;
    if (assigned_names_.count(node->s(c10::attr::name)) != 0) return;
    const c10::IValue value = owner->getSlot(slot);
    const auto [it, added] = lowered_.try_emplace({owner.get(), slot}, nullptr);
    if (added) it->second = Replacement(owner, slot, value, node->output()->type());
    node->output()->replaceAllUsesWith(it->second);
    node->destroy();
  }

  jit::Value* Replacement(const ScriptObject& owner, size_t slot, const c10::IValue& value,
                          const c10::TypePtr& type) {
    if (IsConstantKind(value)) {
      captured_.baked.push_back({.attribute = {owner, slot}, .value = value});
      const jit::WithInsertPoint at_front(*graph_.nodes().begin());
      return graph_.insertConstant(value);
    }
    StateInput input{.attribute = {owner, slot}};
    if (value.isTensor() && value.toTensor().defined()) {
      const c10::TensorImpl* tensor = value.toTensor().unsafeGetTensorImpl();
      const auto named = names_.find(tensor);
      if (named != names_.end()) input.name = named->second;
    }
    captured_.state.push_back(std::move(input));
    return graph_.addInput()->setType(type);
  }

  jit::Value* ObjectInput(const ScriptObject& object) {
    jit::Value*& input = object_inputs_[object.get()];
    if (input == nullptr) {
      captured_.state.push_back({.value = c10::IValue(object)});
      input = graph_.addInput()->setType(object->type());
    }
    return input;
  }

  const jit::Module& module_;
  CapturedGraph& captured_;
  jit::Graph& graph_;
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
  std::unordered_map<const jit::Value*, ScriptObject> objects_;
  std::vector<jit::Value*> object_values_;
  std::set<Attribute> assigned_;
  std::set<std::string> assigned_names_;
  std::map<Attribute, jit::Value*> lowered_;
  std::map<const c10::ivalue::Object*, jit::Value*> object_inputs_;
};

}  // namespace

std::string NameOf(const jit::Module& module) {
  const auto& name = module.type()->name();
  return name.has_value() ? name->name() : "a module without a name";
}

CapturedGraph CaptureScript(const jit::Module& module) {
  CapturedGraph captured;
  captured.name = NameOf(module);
  captured.graph = module.get_method("forward").graph()->copy();
  jit::Inline(*captured.graph);
  RefuseAutocastBlocks(captured.name, *captured.graph);
  captured.arguments = captured.graph->inputs().size() - 1;  // without `self`
  Lowering(module, captured).Run();
  jit::EliminateDeadCode(captured.graph);
  jit::ConstantPropagationImmutableTypes(captured.graph);
  jit::PeepholeOptimize(captured.graph);
  jit::ConstantPropagationImmutableTypes(captured.graph);
  jit::EliminateDeadCode(captured.graph);
  return captured;
}

}  // namespace ddp::internal
