#ifndef DDP_MODEL_TENSORS_H_
#define DDP_MODEL_TENSORS_H_

#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/model_metadata.h"
#include "ddp/reducer.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::internal {

struct NamedTensor {
  std::string name;  // "layer.weight"
  at::Tensor tensor;
};

// The parameters and buffers of a module that a wrapper handles, in the order of registration.
// Names in `ignored` are left out. Throws ConfigurationError for an ignored name that the module
// does not have.
struct ModelTensors {
  static ModelTensors Of(const torch::nn::Module& module, const std::set<std::string>& ignored);

  std::vector<NamedTensor> parameters;  // with shared tensors once per name
  std::vector<NamedTensor> buffers;

  // The parameters that require a gradient; a shared tensor under its first name only. Weights of
  // an Embedding or EmbeddingBag with sparse=true are marked.
  std::vector<Reducer::Parameter> trainable;

  // Adds all parameters and buffers, in order.
  void Describe(ModelMetadata& metadata) const;

  // Throws ConfigurationError when a tensor is sparse or quantized, the tensors are on more than
  // one device, or their device has another type than `device`. The message names the tensors.
  void CheckDevices(at::Device device, const std::string& backend) const;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_TENSORS_H_
