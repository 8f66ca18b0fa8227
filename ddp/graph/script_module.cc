#include "ddp/graph/script_module.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/api/module.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/graph/cut/piece_table.h"
#include "ddp/graph/optimize_graph.h"
#include "ddp/model/jit_module_view.h"

namespace ddp {
namespace {

namespace jit = torch::jit;

void CheckUsable(const jit::Module& script) {
  const internal::JitModuleView view(script);  // throws for no forward, and for no parameters
  if (!view.sparse_parameters().empty()) {
    throw ConfigurationError(
        absl::StrCat(view.name(),
                     " has an embedding with sparse=True; wrap the TorchScript module itself, "
                     "without optimize_graph()"));
  }
  const auto type = script.type();
  if (!type->getForwardHooks().empty() || !type->getForwardPreHooks().empty()) {
    throw ConfigurationError(
        absl::StrCat(view.name(),
                     " has forward hooks, which are not part of its forward; wrap the TorchScript "
                     "module itself, without optimize_graph()"));
  }
}

// A collective cannot be part of a graph. A script has the layer by its name only.
void RefuseStatisticsLayers(const jit::Module& script) {
  const auto modules = script.named_modules();
  for (const auto& item : modules) {
    const std::string type = internal::NameOf(item.value);
    if (type.find("SyncBatchNorm") == std::string::npos) continue;
    throw ConfigurationError(absl::StrCat(
        item.name.empty() ? "the model" : item.name, " (", type,
        ") takes its statistics over all ranks, by a collective that a graph cannot hold: "
        "use a batch norm of one rank, or train the model without optimize_graph()"));
  }
}

// The properties that all parameters of a bucket share.
using Kind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

Kind KindOf(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.device().type(), tensor.device().index()};
}

}  // namespace

// A submodule of the script as a torch::nn::Module.
class ScriptGraphModule::Mirror final : public torch::nn::Module {
 public:
  using Memo = std::map<const c10::ivalue::Object*, std::shared_ptr<torch::nn::Module>>;

  explicit Mirror(const jit::Module& script)
      : torch::nn::Module(internal::NameOf(script)), script_(script) {}

  void train(bool on = true) override {
    torch::nn::Module::train(on);
    SetMode(script_, on);
  }
  bool is_training() const noexcept override { return script_.is_training(); }

  // Sets the mode of `script` without its submodules.
  static void SetMode(jit::Module& script, bool on) {
    if (script.hasattr("training")) script.setattr("training", on);
  }

  // Registers the tensors and submodules of `script` in `module`.
  static void Register(const jit::Module& script, torch::nn::Module& module, Memo& memo,
                       std::vector<Followed>& followed) {
    const auto follow = [&](const std::string& name, const at::Tensor& tensor) {
      followed.push_back({.registered = tensor,
                          .attribute = {script._ivalue(), script.type()->getAttributeSlot(name)}});
    };
    const auto parameters = script.named_parameters(/*recurse=*/false);
    for (const auto& item : parameters) {
      module.register_parameter(item.name, item.value, item.value.requires_grad());
      follow(item.name, item.value);
    }
    const auto buffers = script.named_buffers(/*recurse=*/false);
    for (const auto& item : buffers) {
      module.register_buffer(item.name, item.value);
      follow(item.name, item.value);
    }
    const auto children = script.named_children();
    for (const auto& item : children) {
      std::shared_ptr<torch::nn::Module>& child = memo[item.value._ivalue().get()];
      if (child == nullptr) {
        child = std::make_shared<Mirror>(item.value);
        Register(item.value, *child, memo, followed);
      }
      module.register_module(item.name, child);
    }
  }

 private:
  jit::Module script_;
};

ScriptGraphModule::ScriptGraphModule(const jit::Module& script, const GraphOptions& options)
    : torch::nn::Module(internal::NameOf(script)),
      options_(options),
      script_(std::make_unique<jit::Module>(script)) {
  CheckUsable(script);
  if (const int most = options_.max_graphs; most < 1) {
    throw ConfigurationError(absl::StrCat("max_graphs is ", most, ", and must be at least 1"));
  }
  RefuseStatisticsLayers(script);
  Mirror::Memo memo;
  Mirror::Register(*script_, *this, memo, followed_);
  ListParameters();
  AddProgram();
}

ScriptGraphModule::~ScriptGraphModule() = default;

torch::jit::Module ScriptGraphModule::script() const { return *script_; }

bool ScriptGraphModule::is_training() const noexcept { return script_->is_training(); }

void ScriptGraphModule::train(bool on) {
  torch::nn::Module::train(on);
  Mirror::SetMode(*script_, on);
}

void ScriptGraphModule::ListParameters() {
  std::unordered_set<const c10::TensorImpl*> seen;
  const std::set<std::string>& to_ignore = options_.params_to_ignore;
  std::set<std::string> unknown = to_ignore;
  const auto buffers = named_buffers();
  for (const auto& item : buffers) unknown.erase(item.key());
  const auto parameters = named_parameters();
  for (const bool excluded : {false, true}) {  // a tensor may have names of both kinds
    for (const auto& item : parameters) {
      unknown.erase(item.key());
      if ((to_ignore.count(item.key()) != 0) != excluded) continue;
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      model_parameters_.push_back(
          {.name = item.key(), .tensor = item.value(), .excluded = excluded});
    }
  }
  if (unknown.empty()) return;
  throw ConfigurationError(absl::StrCat("params_to_ignore names ", *unknown.begin(), ", which ",
                                        name(), " does not have"));
}

std::vector<std::vector<std::string>> ScriptGraphModule::bucket_layout() const {
  std::map<std::string, Kind> waiting;
  for (const internal::ModelParameter& parameter : model_parameters_) {
    if (!parameter.ignored()) waiting[parameter.name] = KindOf(parameter.tensor);
  }
  std::vector<std::vector<std::string>> layout;
  std::map<Kind, size_t> last_of_kind;  // bucket
  const auto add = [&](const std::string& name, std::map<Kind, size_t>& buckets) {
    const auto parameter = waiting.extract(name);
    if (parameter.empty()) return;
    const Kind kind = parameter.mapped();
    const auto [bucket, added] = buckets.try_emplace(kind, layout.size());
    if (added) layout.emplace_back();
    layout[bucket->second].push_back(name);
    last_of_kind[kind] = bucket->second;
  };
  const std::vector<internal::PieceRow>& rows = programs_[0]->rows();
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
    std::map<Kind, size_t> buckets;
    for (const std::string& name : row->parameters) add(name, buckets);
  }
  for (const internal::ModelParameter& parameter : model_parameters_) {
    add(parameter.name, last_of_kind);  // where the graph does not read it
  }
  return layout;
}

std::string ScriptGraphModule::describe() const {
  return internal::PieceTable(name(), programs_[0]->rows());
}

std::string ScriptGraphModule::describe_as_json() const {
  return internal::PiecesAsJson(name(), programs_[0]->rows());
}

// Makes the program for the attributes' present values.
void ScriptGraphModule::AddProgram() {
  internal::CapturedGraph captured = internal::CaptureScript(*script_);
  FindAssigned(captured);
  programs_.push_back(std::make_unique<internal::CutProgram>(
      std::move(captured), model_parameters_, options_, /*tolerant=*/!programs_.empty()));
}

// Returns the program for the attributes' present values. Null: there are max_graphs others.
const internal::CutProgram* ScriptGraphModule::Program() {
  for (const auto& program : programs_) {
    if (program->Holds()) return program.get();
  }
  if (static_cast<int64_t>(graphs()) >= options_.max_graphs) {
    LOG_IF(WARNING, !std::exchange(warned_, true))
        << name() << " has " << graphs()
        << " graphs, one for each combination of values in its attributes; calls with further "
           "combinations run without a graph (max_graphs)";
    return nullptr;
  }
  AddProgram();
  return programs_.back().get();
}

// Marks the tensors that the code may assign. Refuses those that cannot be followed.
void ScriptGraphModule::FindAssigned(const internal::CapturedGraph& captured) {
  for (Followed& followed : followed_) {
    if (!followed.registered.defined()) continue;
    const bool known = std::find(captured.assigned.begin(), captured.assigned.end(),
                                 followed.attribute) != captured.assigned.end();
    if (!known && (!captured.assigns_others || followed.registered.requires_grad())) continue;
    const auto names = std::count_if(followed_.begin(), followed_.end(), [&](const auto& other) {
      return other.registered.is_same(followed.registered);
    });
    if (followed.registered.requires_grad() || names > 1) {
      throw ConfigurationError(absl::StrCat(
          "the forward of ", name(), " assigns ",
          followed.attribute.owner->type()->getAttributeName(followed.attribute.slot), ", which ",
          names > 1 ? "is also an attribute of another name" : "needs a gradient",
          "; write to it in place, or train the script without optimize_graph()"));
    }
    followed.assigned = true;
  }
}

// Gives copies to the attributes that the code may assign. Autograd saves tensors without a copy:
// so what it saves in this forward is never the registered tensor, which Follow() changes.
void ScriptGraphModule::Lend() {
  for (Followed& followed : followed_) {
    if (!followed.assigned) continue;
    followed.lent = followed.registered.detach().clone();
    followed.version = followed.lent._version();
    followed.attribute.Set(followed.lent);
  }
}

// Makes the registered tensor and the script's attribute one tensor again, with the value that the
// script has assigned. The value is copied: autograd may have saved the assigned tensor.
void ScriptGraphModule::Follow() {
  for (Followed& followed : followed_) {
    const at::Tensor lent = std::exchange(followed.lent, {});
    const c10::IValue& now = followed.attribute.Value();
    if (!now.isTensor() || !now.toTensor().defined()) continue;
    const at::Tensor assigned = now.toTensor();
    if (assigned.is_same(followed.registered)) continue;
    const bool unchanged = assigned.is_same(lent) && lent._version() == followed.version;
    if (!unchanged) followed.registered.set_data(assigned.detach().clone());
    followed.attribute.Set(followed.registered);
  }
}

c10::IValue ScriptGraphModule::forward(std::vector<c10::IValue> inputs) {
  inputs.insert(inputs.begin(), script_->_ivalue());  // the argument `self`
  try {
    const c10::FunctionSchema& schema = script_->get_method("forward").function().getSchema();
    schema.checkAndNormalizeInputs(inputs, {});
  } catch (const std::exception& error) {
    throw ConfigurationError(internal::MessageOf(error));
  }
  inputs.erase(inputs.begin());
  Follow();
  const internal::CutProgram* program = nullptr;
  try {
    if (c10::GradMode::is_enabled()) {
      program = Program();
      Lend();
    }
    c10::IValue result = program == nullptr ? script_->get_method("forward")(std::move(inputs))
                                            : program->Run(std::move(inputs)).at(0);
    Follow();
    return result;
  } catch (...) {
    Follow();
    throw;
  }
}

std::shared_ptr<ScriptGraphModule> optimize_graph(const jit::Module& script,
                                                  const GraphOptions& options) {
  return std::make_shared<ScriptGraphModule>(script, options);
}

}  // namespace ddp
