#ifndef DDP_MODEL_WRAPPED_PARAMETERS_H_
#define DDP_MODEL_WRAPPED_PARAMETERS_H_

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/model/model_tensors.h"
#include "ddp/model/model_view.h"

namespace ddp::internal {

struct ModelTensors;

// The parameters that a model had when it was wrapped. A parameter that requires a gradient later,
// and did not then, has no place in a bucket: its gradient would differ between the ranks. The
// checks find such a parameter, and throw ConfigurationError with its name.
//
// Keeps the tensors. Thread-compatible.
class WrappedParameters {
 public:
  explicit WrappedParameters(const ModelTensors& tensors);

  // Checks the parameters that were frozen when the model was wrapped. Reads one flag of each, and
  // nothing of the others: cheap enough for every iteration.
  void CheckFrozen() const;

  // Checks all parameters that `model` has now, except the names in `ignored`. Finds parameters
  // that the program has registered since then. Reads all names of the model: for a few iterations
  // only.
  void CheckAll(const ModelView& model, const std::set<std::string>& ignored) const;

 private:
  std::vector<NamedTensor> frozen_;
  std::vector<at::Tensor> trainable_;  // sorted by identity
};

inline constexpr char kWrapAgain[] = ": construct a new DistributedDataParallel";

inline bool BeforeByIdentity(const at::Tensor& a, const at::Tensor& b) {
  return std::less<>()(a.unsafeGetTensorImpl(), b.unsafeGetTensorImpl());
}

inline WrappedParameters::WrappedParameters(const ModelTensors& tensors) {
  for (const NamedTensor& item : tensors.parameters) {
    if (!item.tensor.requires_grad()) frozen_.push_back(item);
  }
  for (const TrainableParameter& item : tensors.trainable) trainable_.push_back(item.tensor);
  std::sort(trainable_.begin(), trainable_.end(), BeforeByIdentity);
}

inline void WrappedParameters::CheckFrozen() const {
  for (const NamedTensor& item : frozen_) {
    if (!item.tensor.requires_grad()) continue;
    throw ConfigurationError(absl::StrCat(
        item.name, " requires a gradient now and did not when it was wrapped", kWrapAgain));
  }
}

inline void WrappedParameters::CheckAll(const ModelView& model,
                                        const std::set<std::string>& ignored) const {
  for (const NamedTensor& item : model.parameters()) {
    if (!item.tensor.defined() || !item.tensor.requires_grad() || ignored.contains(item.name) ||
        std::binary_search(trainable_.begin(), trainable_.end(), item.tensor, BeforeByIdentity)) {
      continue;
    }
    throw ConfigurationError(
        absl::StrCat(item.name, " requires a gradient and was not there when the model was wrapped",
                     kWrapAgain));
  }
}

}  // namespace ddp::internal

#endif  // DDP_MODEL_WRAPPED_PARAMETERS_H_
