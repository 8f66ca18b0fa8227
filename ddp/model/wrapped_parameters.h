#ifndef DDP_MODEL_WRAPPED_PARAMETERS_H_
#define DDP_MODEL_WRAPPED_PARAMETERS_H_

#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

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

}  // namespace ddp::internal

#endif  // DDP_MODEL_WRAPPED_PARAMETERS_H_
