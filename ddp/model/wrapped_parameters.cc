#include "ddp/model/wrapped_parameters.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/model/model_tensors.h"

namespace ddp::internal {
namespace {

constexpr char kRemedy[] = ": construct a new DistributedDataParallel";

bool Before(const at::Tensor& a, const at::Tensor& b) {
  return std::less<>()(a.unsafeGetTensorImpl(), b.unsafeGetTensorImpl());
}

}  // namespace

WrappedParameters::WrappedParameters(const ModelTensors& tensors) {
  for (const NamedTensor& item : tensors.parameters) {
    if (!item.tensor.requires_grad()) frozen_.push_back(item);
  }
  for (const TrainableParameter& item : tensors.trainable) trainable_.push_back(item.tensor);
  std::sort(trainable_.begin(), trainable_.end(), Before);
}

void WrappedParameters::CheckFrozen() const {
  for (const NamedTensor& item : frozen_) {
    if (!item.tensor.requires_grad()) continue;
    throw ConfigurationError(absl::StrCat(
        item.name, " requires a gradient now and did not when it was wrapped", kRemedy));
  }
}

void WrappedParameters::CheckAll(const ModelView& model,
                                 const std::set<std::string>& ignored) const {
  for (const NamedTensor& item : model.parameters()) {
    if (!item.tensor.defined() || !item.tensor.requires_grad() || ignored.contains(item.name) ||
        std::binary_search(trainable_.begin(), trainable_.end(), item.tensor, Before)) {
      continue;
    }
    throw ConfigurationError(absl::StrCat(
        item.name, " requires a gradient and was not there when the model was wrapped", kRemedy));
  }
}

}  // namespace ddp::internal
