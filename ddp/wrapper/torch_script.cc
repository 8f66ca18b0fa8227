#include "ddp/torch_script.h"

#include <iterator>
#include <utility>

#include "ddp/model/jit_module_view.h"
#include "ddp/options.h"

namespace ddp {
namespace {

using Kwargs = DistributedDataParallel<torch::jit::Module>::Kwargs;
using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

// Returns a copy of `value` with place(tensor) for every tensor, in new tuples, lists and dicts.
// TorchScript objects are shared with `value` and not changed.
c10::IValue Placed(const c10::IValue& value, const TensorFunction& place) {
  if (value.isTensor()) return value.toTensor().defined() ? place(value.toTensor()) : value;
  if (value.isTuple()) {
    const c10::ivalue::Tuple& tuple = value.toTupleRef();
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : tuple.elements()) elements.push_back(Placed(element, place));
    return c10::ivalue::Tuple::createNamed(std::move(elements), tuple.type());
  }
  if (value.isList()) {
    c10::List<c10::IValue> list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, Placed(list.get(i), place));
    return list;
  }
  if (value.isGenericDict()) {
    c10::Dict<c10::IValue, c10::IValue> dict = value.toGenericDict().copy();
    for (const auto& entry : dict) entry.setValue(Placed(entry.value(), place));
    return dict;
  }
  return value;
}

// The tensors in a module's result.
struct Outputs {
  std::vector<at::Tensor> tensors;
  bool complete = true;  // false: the result may hold others, which cannot be seen
};

Outputs OutputsOf(const c10::IValue& value) {
  Outputs outputs;
  std::unordered_set<const void*> objects;  // seen before, so that a cycle of objects ends
  value.visit([&](const c10::IValue& part) {
    if (part.isTensor() && part.toTensor().defined()) outputs.tensors.push_back(part.toTensor());
    if (part.isFuture() || part.isRRef() || part.isCapsule() || part.isPyObject()) {
      outputs.complete = false;
    }
    return part.isObject() && !objects.insert(part.internalToPointer()).second;  // true: skip
  });
  return outputs;
}

// Returns all arguments by position, as the module's hooks expect them.
std::vector<c10::IValue> ByPosition(const torch::jit::Module& module,
                                    std::vector<c10::IValue> inputs, const Kwargs& kwargs) {
  if (kwargs.empty()) return inputs;
  inputs.insert(inputs.begin(), module._ivalue());  // the argument `self`
  const c10::FunctionSchema& schema = module.get_method("forward").function().getSchema();
  schema.checkAndNormalizeInputs(inputs, kwargs);
  inputs.erase(inputs.begin());
  return inputs;
}

}  // namespace

DistributedDataParallel<torch::jit::Module>::DistributedDataParallel(
    const torch::jit::Module& module, std::shared_ptr<ProcessGroup> group,
    const DistributedDataParallelOptions& options)
    : DataParallelHandle(std::make_shared<internal::JitModuleView>(module), std::move(group),
                         options),
      module_(module) {}

DistributedDataParallel<torch::jit::Module>::DistributedDataParallel(
    const torch::jit::Module& module, const DistributedDataParallelOptions& options)
    : DataParallelHandle(std::make_shared<internal::JitModuleView>(module), options),
      module_(module) {}

c10::IValue DistributedDataParallel<torch::jit::Module>::forward(std::vector<c10::IValue> inputs,
                                                                 const Kwargs& kwargs) {
  CheckNotEmpty();
  try {
    return Run(std::move(inputs), kwargs);
  } catch (...) {
    OnForwardException();  // the peers wait for this rank
    throw;
  }
}

c10::IValue DistributedDataParallel<torch::jit::Module>::Run(std::vector<c10::IValue> inputs,
                                                             const Kwargs& kwargs) {
  BeforeForward();
  inputs = ByPosition(module_, std::move(inputs), kwargs);
  if (PlacesInputs()) {
    for (c10::IValue& input : inputs) {
      input = Placed(input, [this](const at::Tensor& tensor) { return PlaceInput(tensor); });
    }
  }
  c10::IValue result = module_(std::move(inputs));
  if (PlacesOutputs()) {
    result = Placed(result, [this](const at::Tensor& tensor) { return PlaceOutput(tensor); });
  }
  const Outputs outputs = OutputsOf(result);
  AfterForward(outputs.tensors, outputs.complete);
  return result;
}

torch::jit::Module DistributedDataParallel<torch::jit::Module>::module() const {
  CheckNotEmpty();
  return module_;
}

std::vector<at::Tensor> DistributedDataParallel<torch::jit::Module>::parameters(
    bool recurse) const {
  std::vector<at::Tensor> parameters;
  for (torch::jit::NameTensor& item : named_parameters(recurse)) {
    parameters.push_back(std::move(item.value));
  }
  return parameters;
}

std::vector<torch::jit::NameTensor> DistributedDataParallel<torch::jit::Module>::named_parameters(
    bool recurse) const {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<torch::jit::NameTensor> parameters;
  for (const torch::jit::NameTensor& item : module().named_parameters(recurse)) {
    if (internal::IsNew(seen, item.value)) parameters.push_back(item);
  }
  return parameters;
}

void DistributedDataParallel<torch::jit::Module>::zero_grad(bool set_to_none) {
  for (const at::Tensor& parameter : parameters()) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    gradient = gradient.detach();
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

}  // namespace ddp
