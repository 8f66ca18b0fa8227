#include "ddp/graph/script_module.h"

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/graph/script_capture.h"
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

std::string NameOf(const jit::Module& script) {
  const auto& name = script.type()->name();
  return name.has_value() ? name->name() : "a module without a name";
}

}  // namespace

// A submodule of the script as a torch::nn::Module.
class ScriptGraphModule::Mirror final : public torch::nn::Module {
 public:
  using Memo = std::map<const c10::ivalue::Object*, std::shared_ptr<torch::nn::Module>>;

  explicit Mirror(const jit::Module& script) : torch::nn::Module(NameOf(script)), script_(script) {}

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
                          .owner = script._ivalue(),
                          .slot = script.type()->getAttributeSlot(name)});
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
    : GraphModuleBase(NameOf(script), options), script_(std::make_unique<jit::Module>(script)) {
  CheckUsable(script);
  Mirror::Memo memo;
  Mirror::Register(*script_, *this, memo, followed_);
  for (const auto& child : children()) internal::RefuseStatisticsLayers(*child);
  ListParameters(/*sparse=*/{});
  Program();
}

ScriptGraphModule::~ScriptGraphModule() = default;

torch::jit::Module ScriptGraphModule::script() const { return *script_; }

bool ScriptGraphModule::is_training() const noexcept { return script_->is_training(); }

void ScriptGraphModule::train(bool on) {
  torch::nn::Module::train(on);
  Mirror::SetMode(*script_, on);
}

const internal::CutProgram* ScriptGraphModule::FirstProgram() const {
  return programs_.empty() ? nullptr : programs_[0].get();
}

// Returns the program for the attributes' present values. Null: there are max_graphs others.
const internal::CutProgram* ScriptGraphModule::Program() {
  for (const auto& program : programs_) {
    if (program->Holds()) return program.get();
  }
  if (!MayAddGraph("values in its attributes")) return nullptr;
  internal::CapturedGraph captured = internal::CaptureScript(*script_);
  FindAssigned(captured);
  auto program =
      std::make_unique<internal::CutProgram>(std::move(captured), model_parameters(), options(),
                                             /*tolerant=*/!programs_.empty());
  programs_.push_back(std::move(program));
  return programs_.back().get();
}

// Marks the tensors that the code may assign. Refuses those that cannot be followed.
void ScriptGraphModule::FindAssigned(const internal::CapturedGraph& captured) {
  for (Followed& followed : followed_) {
    if (!followed.registered.defined()) continue;
    const bool known =
        std::any_of(captured.assigned.begin(), captured.assigned.end(), [&](const auto& attribute) {
          return attribute.owner == followed.owner && attribute.slot == followed.slot;
        });
    if (!known && (!captured.assigns_others || followed.registered.requires_grad())) continue;
    const auto names = std::count_if(followed_.begin(), followed_.end(), [&](const auto& other) {
      return other.registered.is_same(followed.registered);
    });
    if (followed.registered.requires_grad() || names > 1) {
      throw ConfigurationError(
          absl::StrCat("the forward of ", name(), " assigns ",
                       followed.owner->type()->getAttributeName(followed.slot), ", which ",
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
    followed.owner->setSlot(followed.slot, followed.lent);
  }
}

// Makes the registered tensor and the script's attribute one tensor again, with the value that the
// script has assigned. The value is copied: autograd may have saved the assigned tensor.
void ScriptGraphModule::Follow() {
  for (Followed& followed : followed_) {
    const at::Tensor lent = std::exchange(followed.lent, {});
    const c10::IValue& now = followed.owner->getSlot(followed.slot);
    if (!now.isTensor() || !now.toTensor().defined()) continue;
    const at::Tensor assigned = now.toTensor();
    if (assigned.is_same(followed.registered)) continue;
    const bool unchanged = assigned.is_same(lent) && lent._version() == followed.version;
    if (!unchanged) followed.registered.set_data(assigned.detach().clone());
    followed.owner->setSlot(followed.slot, followed.registered);
  }
}

c10::IValue ScriptGraphModule::forward(std::vector<c10::IValue> inputs) {
  if (jit::tracer::isTracing()) {
    throw ConfigurationError(
        absl::StrCat(name(),
                     " is an optimized script inside of a module that optimize_graph() captures; a "
                     "capture cannot follow a script: optimize the script alone"));
  }
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
