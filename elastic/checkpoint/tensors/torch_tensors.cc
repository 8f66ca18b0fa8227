#include "elastic/checkpoint/tensors/torch_tensors.h"

#include <optional>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/nn/module.h>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "ddp/common/logging.h"

namespace ddp::elastic {
namespace {

struct DtypePair {
  Dtype dtype;
  at::ScalarType scalar_type;
};
constexpr DtypePair kDtypes[] = {
    {Dtype::kBool, at::kBool},
    {Dtype::kU8, at::kByte},
    {Dtype::kI8, at::kChar},
    {Dtype::kF8E5M2, at::kFloat8_e5m2},
    {Dtype::kF8E4M3, at::kFloat8_e4m3fn},
    {Dtype::kI16, at::kShort},
    {Dtype::kU16, at::kUInt16},
    {Dtype::kF16, at::kHalf},
    {Dtype::kBF16, at::kBFloat16},
    {Dtype::kI32, at::kInt},
    {Dtype::kU32, at::kUInt32},
    {Dtype::kF32, at::kFloat},
    {Dtype::kF64, at::kDouble},
    {Dtype::kI64, at::kLong},
    {Dtype::kU64, at::kUInt64},
    {Dtype::kC64, at::kComplexFloat},
};

std::optional<Dtype> DtypeOf(at::ScalarType scalar_type) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.scalar_type == scalar_type) return pair.dtype;
  }
  return std::nullopt;
}

at::ScalarType ScalarTypeOf(Dtype dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.dtype == dtype) return pair.scalar_type;
  }
  LOG(FATAL) << "no scalar type for " << DtypeName(dtype);
}

// A key that is equal for tied tensors: address, element type, sizes and strides.
using Identity =
    std::tuple<const void*, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>>;

Identity IdentityOf(const at::Tensor& tensor) {
  // A tensor without elements has no memory to share.
  const bool has_memory = tensor.layout() == at::kStrided && tensor.numel() > 0;
  if (!has_memory) return {tensor.unsafeGetTensorImpl(), tensor.scalar_type(), {}, {}};
  return {tensor.const_data_ptr(), tensor.scalar_type(), tensor.sizes().vec(),
          tensor.strides().vec()};
}

// Returns the tensor of every name of the model, aliases included.
std::map<std::string, at::Tensor> WithAliases(const ModelTensors& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const NamedTensor& tensor : model.parameters) tensors[tensor.name] = tensor.tensor;
  for (const NamedTensor& tensor : model.buffers) tensors[tensor.name] = tensor.tensor;
  for (const auto& [alias, name] : model.aliases) tensors[alias] = tensors.at(name);
  return tensors;
}

std::map<std::string, const TensorRecord*> RecordsWithAliases(
    const Manifest& manifest, std::vector<std::string>& mismatches) {
  std::map<std::string, const TensorRecord*> records;
  for (const TensorRecord& tensor : manifest.tensors) {
    if (absl::StartsWith(tensor.file, "model-")) records[tensor.name] = &tensor;
  }
  std::vector<std::pair<std::string, const TensorRecord*>> aliased;
  for (const auto& [alias, name] : manifest.aliases) {
    const auto found = records.find(name);
    if (found == records.end()) {
      mismatches.push_back(
          absl::StrCat(alias, ": tied in the checkpoint to ", name, ", which it does not have"));
    } else {
      aliased.emplace_back(alias, found->second);
    }
  }
  records.insert(aliased.begin(), aliased.end());
  return records;
}

const TensorView& ValueOf(const std::string& name,
                          const std::map<std::string, std::string>& aliases,
                          const std::map<std::string, TensorView>& values) {
  const auto value = values.find(name);
  return value != values.end() ? value->second : values.find(aliases.at(name))->second;
}

// Returns the dimensions along which `tensor` repeats one element (a stride of 0).
std::vector<int64_t> RepeatedDimensions(const at::Tensor& tensor) {
  std::vector<int64_t> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) == 0) dimensions.push_back(i);
  }
  return dimensions;
}

at::Tensor WithoutRepeats(at::Tensor tensor, const std::vector<int64_t>& dimensions) {
  for (const int64_t dimension : dimensions) tensor = tensor.narrow(dimension, 0, 1);
  return tensor;
}

}  // namespace

ModelTensors TensorsOf(const torch::nn::Module& model) {
  ModelTensors tensors;
  std::map<Identity, std::string> names;
  const auto add = [&](const std::string& name, const at::Tensor& tensor,
                       std::vector<NamedTensor>& list) {
    if (!tensor.defined()) return;
    const auto [first, is_new] = names.emplace(IdentityOf(tensor), name);
    if (is_new) {
      list.push_back({name, tensor});
    } else {
      tensors.aliases[name] = first->second;
    }
    tensors.parameter_names.emplace(tensor.unsafeGetTensorImpl(), name);
  };
  for (const auto& item : model.named_parameters()) {
    add(item.key(), item.value(), tensors.parameters);
  }
  for (const auto& item : model.named_buffers()) add(item.key(), item.value(), tensors.buffers);
  return tensors;
}

absl::StatusOr<TensorType> TypeOf(const NamedTensor& named) {
  const at::Tensor& tensor = named.tensor;
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", named.name,
                     " is sparse, quantized or without memory; only dense "
                     "tensors can be saved"));
  }
  const std::optional<Dtype> dtype = DtypeOf(tensor.scalar_type());
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", named.name, " is of type ",
                                                   c10::toString(tensor.scalar_type()),
                                                   ", which safetensors files do not have"));
  }
  TensorType type{.dtype = *dtype, .shape = {}};
  for (const int64_t size : tensor.sizes()) type.shape.push_back(static_cast<uint64_t>(size));
  return type;
}

absl::StatusOr<std::vector<TensorView>> ViewsOf(const std::vector<NamedTensor>& tensors,
                                                std::vector<at::Tensor>& keep) {
  const at::NoGradGuard no_grad;
  std::vector<TensorView> views;
  for (const NamedTensor& named : tensors) {
    DDP_ASSIGN_OR_RETURN(TensorType type, TypeOf(named));
    at::Tensor host = named.tensor.detach();
    if (!host.device().is_cpu() || !host.is_contiguous()) {
      host = host.to(at::kCPU).contiguous();
    }
    // The memory of a conjugated or negated view does not hold the view's values.
    host = host.resolve_conj().resolve_neg();
    keep.push_back(host);
    views.push_back({named.name, std::move(type), static_cast<const char*>(host.const_data_ptr()),
                     static_cast<uint64_t>(host.nbytes())});
  }
  return views;
}

absl::StatusOr<std::vector<TensorView>> FormsOf(const std::vector<NamedTensor>& tensors) {
  std::vector<TensorView> views;
  for (const NamedTensor& named : tensors) {
    DDP_ASSIGN_OR_RETURN(TensorType type, TypeOf(named));
    views.push_back({.name = named.name,
                     .type = std::move(type),
                     .bytes = static_cast<uint64_t>(named.tensor.nbytes())});
  }
  return views;
}

at::Tensor TensorOver(const TensorView& view) {
  std::vector<int64_t> sizes;
  for (const uint64_t size : view.type.shape) sizes.push_back(static_cast<int64_t>(size));
  return at::from_blob(const_cast<char*>(view.data), sizes,
                       at::TensorOptions().dtype(ScalarTypeOf(view.type.dtype)));
}

std::vector<std::string> ModelMismatches(const ModelTensors& model, const Manifest& manifest) {
  std::vector<std::string> mismatches;
  const std::map<std::string, at::Tensor> live = WithAliases(model);
  const std::map<std::string, const TensorRecord*> saved = RecordsWithAliases(manifest, mismatches);
  for (const auto& [name, tensor] : live) {
    const auto found = saved.find(name);
    if (found == saved.end()) {
      mismatches.push_back(absl::StrCat(name, ": in the model, not in the checkpoint"));
      continue;
    }
    const absl::StatusOr<TensorType> type = TypeOf({name, tensor});
    if (!type.ok()) {
      mismatches.push_back(std::string(type.status().message()));
    } else if (*type != found->second->type) {
      mismatches.push_back(absl::StrCat(name, ": ", TensorTypeText(*type), " in the model, ",
                                        TensorTypeText(found->second->type), " in the checkpoint"));
    }
  }
  for (const auto& [name, record] : saved) {
    if (!live.contains(name)) {
      mismatches.push_back(absl::StrCat(name, ": in the checkpoint, not in the model"));
    }
  }
  for (const auto& [alias, name] : model.aliases) {
    const auto one = saved.find(alias);
    const auto other = saved.find(name);
    if (one == saved.end() || other == saved.end()) continue;
    if (one->second->hash != other->second->hash) {
      mismatches.push_back(absl::StrCat(alias, ": one tensor with ", name,
                                        " in the model, another one in the checkpoint"));
    }
  }
  return mismatches;
}

absl::Status CheckLoadable(const ModelTensors& model,
                           const std::map<std::string, std::string>& aliases,
                           const std::map<std::string, TensorView>& values) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : WithAliases(model)) {
    if (tensor.is_inference()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "tensor ", name, " was made in inference mode and cannot be changed: clone it"));
    }
    const std::vector<int64_t> repeated = RepeatedDimensions(tensor);
    if (repeated.empty()) continue;
    const at::Tensor value = TensorOver(ValueOf(name, aliases, values));
    if (!value.equal(WithoutRepeats(value, repeated).expand_as(value))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "tensor ", name,
          " is expanded from one with fewer values (a stride is 0), and the "
          "checkpoint's values differ where the model has only one: register a contiguous tensor"));
    }
  }
  return absl::OkStatus();
}

void LoadModel(const ModelTensors& model, const std::map<std::string, std::string>& aliases,
               const std::map<std::string, TensorView>& values) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : WithAliases(model)) {
    const std::vector<int64_t> repeated = RepeatedDimensions(tensor);
    WithoutRepeats(tensor, repeated)
        .copy_(WithoutRepeats(TensorOver(ValueOf(name, aliases, values)), repeated));
  }
}

}  // namespace ddp::elastic
