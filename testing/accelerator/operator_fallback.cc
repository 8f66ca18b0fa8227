#include "testing/accelerator/operator_fallback.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "absl/cleanup/cleanup.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/device_generator.h"

namespace ddp::testing {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Lets a number that was a number of the program's go on not to promote types.
Tensor AsWrappedAs(const Tensor& tensor, Tensor copy) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// Calls `change` with each defined tensor of `value`, also in lists, and puts the tensor that it
// returns in the tensor's place.
template <typename Change>
void ChangeTensors(IValue& value, const Change& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool defined = tensor.has_value() && tensor->defined();
      changed.push_back(defined ? std::optional(change(*tensor)) : std::nullopt);
    }
    value = changed;
  }
}

// As ChangeTensors(), of every value. A tensor that occurs twice gets one replacement: kernels
// compare identities.
template <typename Change>
void ChangeAllTensors(Stack& values, const Change& change) {
  std::unordered_map<const c10::TensorImpl*, Tensor> changed;
  for (IValue& value : values) {
    ChangeTensors(value, [&](const Tensor& tensor) {
      const auto [it, is_new] = changed.try_emplace(tensor.unsafeGetTensorImpl());
      if (is_new) it->second = change(tensor);
      return it->second;
    });
  }
}

std::vector<Tensor> TensorsIn(const IValue& value) {
  std::vector<Tensor> tensors;
  IValue copy = value;
  ChangeTensors(copy, [&](const Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

thread_local bool in_kernel = false;

// Runs the CPU's kernel, or the Meta kernel for meta tensors, and nothing of autograd.
void RunBelowAutograd(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const absl::Cleanup leave = [was = std::exchange(in_kernel, true)] { in_kernel = was; };
  op.callBoxed(stack);
}

// Operators whose result has a shape that depends on the data.
bool HasShapeFromData(const std::string& name) {
  static const auto& names = *new std::unordered_set<std::string>{
      "aten::nonzero",
      "aten::nonzero.out",
      "aten::masked_select",
      "aten::masked_select.out",
      "aten::_unique2",
      "aten::unique_dim",
      "aten::unique_consecutive",
      "aten::bincount",
      "aten::repeat_interleave.Tensor",
      "aten::_unique",
      "aten::unique_dim_consecutive",
  };
  return names.contains(name);
}

// Operators whose Meta kernel gives another shape than the CPU's.
bool HasWrongMetaKernel(const std::string& name) {
  return name.starts_with("aten::mse_loss") || name.starts_with("aten::smooth_l1_loss") ||
         name.starts_with("aten::huber_loss");
}

// One call of an operator.
class DeviceCall {
 public:
  DeviceCall(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), name_(c10::toString(op.operator_name())), arguments_(std::move(arguments)) {
    for (const IValue& argument : arguments_) {
      for (const Tensor& tensor : TensorsIn(argument)) CheckPlace(tensor);
      if (!device_ && argument.isDevice()) device_ = argument.toDevice();
    }
    TORCH_CHECK(device_ && device_->type() == kDevice, name_, " has no tensor on the device");
  }

  // Launches the kernel, and returns the results.
  Stack Run() {
    if (NeedsHost()) return RunOnHost();
    const std::optional<at::Generator> kernel_generator = TakeGenerator();
    Stack results = Rehearse(kernel_generator.has_value());
    ResizeOutputs();
    Stack fresh = AllocateResults(results);
    Stack kernel_arguments = KernelArguments(kernel_generator);
    ChangeAllTensors(fresh, KernelView);
    LaunchOn(*device_, name_, [op = op_, kernel_arguments, fresh]() mutable {
      RunBelowAutograd(op, kernel_arguments);
      CopyResults(kernel_arguments, fresh);
    });
    return results;
  }

 private:
  void CheckPlace(const Tensor& tensor) {
    if (tensor.device().type() == kDevice) {
      TORCH_CHECK(!device_ || *device_ == tensor.device(), name_, " has tensors on ", *device_,
                  " and ", tensor.device());
      device_ = tensor.device();
      return;
    }
    // As on other devices, numbers may come from the host, and so may indices.
    TORCH_CHECK(tensor.dim() == 0 || name_.find("index") != std::string::npos, name_,
                " has tensors on the device and on ", tensor.device());
  }

  bool NeedsHost() const {
    if (HasShapeFromData(name_)) return true;
    for (const IValue& argument : arguments_) {
      if (!argument.isOptionalTensorList()) continue;  // the indices of index() and the like
      for (const Tensor& tensor : TensorsIn(argument)) {
        if (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) return true;
      }
    }
    for (const c10::Argument& result : op_.schema().returns()) {
      const bool tensors = result.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
      if (!tensors) return true;
    }
    return false;
  }

  // Returns results of the kernel, which runs now, on the calling thread.
  Stack RunOnHost() {
    Accelerator().Synchronize(CurrentStream(*device_));
    Stack kernel_results = KernelArguments(std::nullopt);
    RunBelowAutograd(op_, kernel_results);
    Stack results = kernel_results;
    Stack fresh = AllocateResults(results);
    ChangeAllTensors(fresh, KernelView);
    LaunchOn(*device_, name_, [kernel_results, fresh] { CopyResults(kernel_results, fresh); });
    return results;
  }

  // For an operator that draws random numbers: returns the generator for the kernel, and leaves the
  // device's generator to Rehearse(), which advances it.
  std::optional<at::Generator> TakeGenerator() {
    const auto& schema = op_.schema().arguments();
    for (size_t i = 0; i < schema.size(); ++i) {
      if (!schema[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
        continue;
      }
      const at::Generator generator =
          arguments_[i].isGenerator() ? arguments_[i].toGenerator() : DefaultGenerator(*device_);
      arguments_[i] = CpuGeneratorOf(generator);
      return arguments_[i].toGenerator().clone();
    }
    return std::nullopt;
  }

  // Returns results with the right shapes and types. Writes the outputs' shapes into
  // `rehearsed_arguments_`.
  Stack Rehearse(bool random) {
    rehearsed_arguments_ = arguments_;
    const bool has_meta = !random && !HasWrongMetaKernel(name_) &&
                          op_.hasKernelForDispatchKey(c10::DispatchKey::Meta);
    ChangeAllTensors(rehearsed_arguments_, [&](const Tensor& tensor) {
      if (tensor.device().type() != kDevice && tensor.dim() == 0) return tensor;
      const auto device = has_meta ? c10::kMeta : c10::kCPU;
      Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(),
                                      tensor.options().device(device).pinned_memory(false));
      if (!has_meta) copy.fill_(random ? 1 : 0);  // no probability and no deviation may be 0
      return copy;
    });
    Stack results = rehearsed_arguments_;
    RunBelowAutograd(op_, results);
    return results;
  }

  bool IsWritten(size_t argument) const {
    const c10::AliasInfo* alias = op_.schema().arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  // Gives outputs the shapes that the rehearsal gave to its copies.
  void ResizeOutputs() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!IsWritten(i)) continue;
      const std::vector<Tensor> outputs = TensorsIn(arguments_[i]);
      const std::vector<Tensor> rehearsed = TensorsIn(rehearsed_arguments_[i]);
      for (size_t j = 0; j < outputs.size(); ++j) {
        if (outputs[j].sizes() != rehearsed[j].sizes()) outputs[j].resize_(rehearsed[j].sizes());
      }
    }
  }

  // Replaces each tensor of `results`: by the argument that the schema says it is, else by a new
  // tensor on the device. Returns the results with the new tensors only.
  Stack AllocateResults(Stack& results) const {
    const auto& schema = op_.schema();
    Stack fresh(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (const c10::AliasInfo* alias = schema.returns()[i].alias_info()) {
        for (size_t j = 0; j < arguments_.size(); ++j) {
          const c10::AliasInfo* other = schema.arguments()[j].alias_info();
          if (other != nullptr && *other == *alias) results[i] = arguments_[j];
        }
        continue;
      }
      ChangeTensors(results[i], [&](const Tensor& tensor) {
        return at::empty_strided(tensor.sizes(), tensor.strides(),
                                 tensor.options().device(*device_));
      });
      fresh[i] = results[i];
    }
    return fresh;
  }

  Stack KernelArguments(const std::optional<at::Generator>& generator) const {
    Stack arguments = arguments_;
    ChangeAllTensors(arguments, [](const Tensor& tensor) {
      if (tensor.device().type() == kDevice) return KernelView(tensor);
      // The host may overwrite its tensor before the kernel runs.
      return AsWrappedAs(tensor, tensor.clone());
    });
    for (IValue& argument : arguments) {
      if (generator && argument.isGenerator()) argument = *generator;
      if (argument.isDevice()) argument = c10::Device(c10::kCPU);
    }
    return arguments;
  }

  static void CopyResults(const Stack& from, const Stack& to) {
    for (size_t i = 0; i < to.size(); ++i) {
      const std::vector<Tensor> sources = TensorsIn(from[i]);
      const std::vector<Tensor> targets = TensorsIn(to[i]);
      for (size_t j = 0; j < targets.size(); ++j) {
        TORCH_CHECK(sources[j].sizes() == targets[j].sizes() &&
                        sources[j].scalar_type() == targets[j].scalar_type(),
                    "result ", i, " has the shape ", sources[j].sizes(), ", not ",
                    targets[j].sizes(), ": the operator's Meta kernel disagrees");
        targets[j].copy_(sources[j]);
      }
    }
  }

  const c10::OperatorHandle op_;
  const std::string name_;
  Stack arguments_;
  Stack rehearsed_arguments_;
  std::optional<c10::Device> device_;
};

}  // namespace

bool InKernel() { return in_kernel; }

Tensor KernelView(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  // A null storage has a null pointer in either mapping.
  c10::Storage kernel_storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(Accelerator().KernelView(storage.data()), c10::Device(c10::kCPU)));
  Tensor view = at::empty({0}, tensor.options().device(c10::kCPU));
  view.set_(std::move(kernel_storage), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return AsWrappedAs(tensor, view);
}

void RunOnDevice(const c10::OperatorHandle& op, Stack* stack) {
  const at::DisableRecordFunctionGuard one_operation;  // for observers; the rest is the kernel's
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  for (IValue& result : DeviceCall(op, std::move(arguments)).Run()) {
    stack->push_back(std::move(result));
  }
}

}  // namespace ddp::testing
