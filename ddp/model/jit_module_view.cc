#include "ddp/model/jit_module_view.h"

#include <optional>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

namespace jit = torch::jit;

template <typename Items>
std::vector<NamedTensor> Named(const Items& items) {
  std::vector<NamedTensor> named;
  for (const auto& item : items) named.push_back({.name = item.name, .tensor = item.value});
  return named;
}

// Finds the values in the code of a module's forward that are known before it runs.
class KnownValues {
 public:
  KnownValues(const jit::Module& module, const jit::Value* self) : module_(module), self_(self) {}

  // Returns the value of a constant, or of an attribute of the module or of a submodule.
  std::optional<c10::IValue> Find(const jit::Value* value) const {
    if (value == self_) return module_._ivalue();
    if (value->node()->kind() != c10::prim::GetAttr) return jit::toIValue(value);
    const std::optional<c10::IValue> owner = Find(value->node()->input());
    if (!owner.has_value() || !owner->isObject()) return std::nullopt;
    return owner->toObjectRef().getAttr(value->node()->s(c10::attr::name));
  }

 private:
  const jit::Module& module_;
  const jit::Value* const self_;
};

bool IsEmbedding(const jit::Node& node) {
  return node.kind() == c10::Symbol::fromQualString("aten::embedding") ||
         node.kind() == c10::Symbol::fromQualString("aten::embedding_bag");
}

void AddSparseWeights(const jit::Block& block, const KnownValues& known,
                      std::set<const c10::TensorImpl*>& weights) {
  for (const jit::Node* node : block.nodes()) {
    for (const jit::Block* inner : node->blocks()) AddSparseWeights(*inner, known, weights);
    if (!IsEmbedding(*node)) continue;
    const std::optional<c10::IValue> sparse = known.Find(node->namedInput("sparse"));
    if (!sparse.has_value() || !sparse->isBool() || !sparse->toBool()) continue;
    const std::optional<c10::IValue> weight = known.Find(node->namedInput("weight"));
    if (!weight.has_value() || !weight->isTensor()) continue;
    weights.insert(weight->toTensor().unsafeGetTensorImpl());
  }
}

}  // namespace

JitModuleView::JitModuleView(const jit::Module& module)
    : module_(std::make_unique<jit::Module>(module)) {
  if (!module_->find_method("forward").has_value()) {
    throw ConfigurationError(
        absl::StrCat("the TorchScript module ", name(), " has no method forward"));
  }
  if (module_->parameters().size() == 0) {
    throw ConfigurationError(absl::StrCat(
        "the TorchScript module ", name(),
        " has no parameters, so there is nothing to train: a frozen module (torch.jit.freeze) has "
        "constants in their place; save the module before it is frozen"));
  }
}

JitModuleView::~JitModuleView() = default;

std::string JitModuleView::name() const {
  const std::optional<c10::QualifiedName>& name = module_->type()->name();
  return name.has_value() ? name->qualifiedName() : "a module without a name";
}

std::vector<NamedTensor> JitModuleView::parameters() const {
  return Named(module_->named_parameters());
}

std::vector<NamedTensor> JitModuleView::buffers() const { return Named(module_->named_buffers()); }

std::set<const c10::TensorImpl*> JitModuleView::sparse_parameters() const {
  const std::shared_ptr<jit::Graph> graph = module_->get_method("forward").graph()->copy();
  jit::Inline(*graph);
  std::set<const c10::TensorImpl*> weights;
  AddSparseWeights(*graph->block(), KnownValues(*module_, graph->inputs().at(0)), weights);
  return weights;
}

bool JitModuleView::is_training() const { return module_->is_training(); }

}  // namespace ddp::internal
