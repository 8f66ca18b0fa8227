#include "ddp/model/model_tensors.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/transfer/coalesced_broadcast.h"

namespace ddp::internal {
namespace {

ModelMetadata::Tensor Description(const NamedTensor& item) {
  return {.name = item.name,
          .dtype = c10::toString(item.tensor.scalar_type()),
          .shape = item.tensor.sizes().vec(),
          .strides = item.tensor.strides().vec(),
          .requires_grad = item.tensor.requires_grad()};
}

}  // namespace

ModelTensors ModelTensors::Of(const ModelView& model, const std::set<std::string>& ignored) {
  ModelTensors tensors;
  std::set<std::string> unknown = ignored;
  const auto take = [&](std::vector<NamedTensor> items, std::vector<NamedTensor>& into) {
    for (NamedTensor& item : items) {
      unknown.erase(item.name);
      if (item.tensor.defined() && !ignored.contains(item.name)) into.push_back(std::move(item));
    }
  };
  take(model.parameters(), tensors.parameters);
  take(model.buffers(), tensors.buffers);
  if (!unknown.empty()) {
    throw ConfigurationError(absl::StrCat("params_and_buffers_to_ignore names ", *unknown.begin(),
                                          ", which the module does not have"));
  }
  const std::set<const c10::TensorImpl*> sparse = model.sparse_parameters();
  std::set<const c10::TensorImpl*> seen;
  for (const NamedTensor& item : tensors.parameters) {
    const c10::TensorImpl* const identity = item.tensor.unsafeGetTensorImpl();
    if (!item.tensor.requires_grad() || !seen.insert(identity).second) continue;
    tensors.trainable.push_back(
        {.name = item.name, .tensor = item.tensor, .sparse = sparse.contains(identity)});
  }
  return tensors;
}

void ModelTensors::Describe(ModelMetadata& metadata) const {
  // Shared tensors and sparse gradients decide the buckets, so the ranks must agree on them.
  std::map<std::string, bool> sparse;
  for (const TrainableParameter& item : trainable) sparse[item.name] = item.sparse;
  for (const NamedTensor& item : parameters) {
    ModelMetadata::Tensor description = Description(item);
    const auto found = sparse.find(item.name);
    if (item.tensor.requires_grad() && found == sparse.end()) description.dtype += " (shared)";
    if (found != sparse.end() && found->second) description.dtype += " (sparse gradient)";
    metadata.AddParameter(description);
  }
  for (const NamedTensor& item : buffers) metadata.AddBuffer(Description(item));
}

void ModelTensors::CheckDevices(at::Device device, const std::string& backend) const {
  const NamedTensor* first = nullptr;
  const auto check = [&](const char* sort, const NamedTensor& item) {
    if (item.tensor.layout() != at::kStrided || item.tensor.is_quantized()) {
      throw ConfigurationError(absl::StrCat(
          sort, " ", item.name, " is ",
          item.tensor.is_quantized() ? "quantized" : c10::str(item.tensor.layout()),
          ": only dense tensors can be kept equal on all ranks; register a dense one, or name it "
          "in params_and_buffers_to_ignore"));
    }
    const at::Device found = item.tensor.device();
    if (first == nullptr) first = &item;
    if (found.type() != first->tensor.device().type()) {
      throw ConfigurationError(
          absl::StrCat("the model is on several types of devices: ", first->name, " is on ",
                       first->tensor.device().str(), ", ", item.name, " on ", found.str(),
                       ": move it to one of them with to() first"));
    }
    // Autograd has one thread per GPU, and gradients of one model must come from one thread.
    if (!found.is_cpu() && found != first->tensor.device()) {
      throw ConfigurationError(absl::StrCat(
          "the model is on several devices: ", first->name, " is on ", first->tensor.device().str(),
          ", ", item.name, " on ", found.str(),
          ". One process trains on one GPU: start one process for each GPU, and move the whole "
          "model to one of them with to() first"));
    }
    const bool other_index =
        found.has_index() && device.has_index() && found.index() != device.index();
    if (found.type() != device.type() || other_index) {
      throw ConfigurationError(absl::StrCat(
          sort, " ", item.name, " is on ", found.str(), ", but the process group (", backend,
          ") works on ", device.str(), ": move the model there with to() first"));
    }
  };
  for (const NamedTensor& item : parameters) check("parameter", item);
  for (const NamedTensor& item : buffers) check("buffer", item);
}

void Broadcast(Communicator& communicator, const std::vector<NamedTensor>& tensors,
               const CoalescedBroadcastOptions& options) {
  std::vector<at::Tensor> values;
  std::vector<std::string> names;
  for (const NamedTensor& item : tensors) {
    values.push_back(item.tensor);
    names.push_back(item.name);
  }
  BroadcastCoalesced(communicator, values, names, options);
}

}  // namespace ddp::internal
