#include "testing/accelerator/default_device.h"

#include <memory>
#include <optional>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "testing/accelerator/operator_fallback.h"

namespace ddp::testing {
namespace {

using torch::jit::Stack;

std::optional<c10::Device>& Default() {
  static std::optional<c10::Device> device;
  return device;
}

// How many operators the calling thread is in, one inside of the other.
thread_local int depth = 0;

// Autograd records the step of a node, which its hooks are in, as a function too.
bool IsOperator(const at::RecordFunction& function) { return function.operator_name().has_value(); }

void CountOperators() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            if (IsOperator(function)) ++depth;
            return nullptr;
          },
          [](const at::RecordFunction& function, at::ObserverContext*) {
            if (IsOperator(function)) --depth;
          })
          .scopes({at::RecordScope::FUNCTION}));
}

// torch::ones() calls at::ones() below autograd, and a program's own at::ones() is above it. What
// operators call, which is below it too, makes tensors of the CPU.
bool CalledAsTorch() {
  return !InKernel() && depth <= 1 &&
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradOther);
}

// Stands in place of LibTorch's kernels that choose a factory's backend by its `device` argument.
void SelectBackend(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::optional<c10::ScalarType> type;
  std::optional<c10::Layout> layout;
  c10::IValue* device = nullptr;
  bool pinned = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    const std::string& name = arguments[i].name();
    if (name == "dtype") type = value.toOptional<c10::ScalarType>();
    if (name == "layout") layout = value.toOptional<c10::Layout>();
    if (name == "device") device = &value;
    if (name == "pin_memory") pinned = value.toOptional<bool>().value_or(false);
  }
  if (device->isNone() && !pinned && CalledAsTorch()) *device = *Default();
  const c10::DispatchKey key =
      c10::computeDispatchKey(type, layout, device->toOptional<c10::Device>());
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

// LibTorch warns that its kernels are replaced.
class NoWarning : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void SetDefaultDevice(c10::Device device) {
  Default() = device;
  CountOperators();
  NoWarning handler;
  const c10::WarningUtils::WarningHandlerGuard no_warning(&handler);
  auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect,
                                      __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) continue;
    if (!op->schema().argumentIndexWithName("pin_memory")) continue;  // not a factory
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&SelectBackend>());
  }
}

}  // namespace ddp::testing
