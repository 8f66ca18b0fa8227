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

// What a wrapper has to do with of a module's parameters and buffers, in the order of registration.
// `ignored`: names that are left out; one that the module does not have is a ConfigurationError.
struct ModelTensors {
  static ModelTensors Of(const torch::nn::Module& module, const std::set<std::string>& ignored);

  std::vector<NamedTensor> parameters;  // a tensor that several modules share is here several times
  std::vector<NamedTensor> buffers;

  // Those that require a gradient, a shared tensor under its first name only. Weights of an
  // Embedding or EmbeddingBag with sparse=true are marked.
  std::vector<Reducer::Parameter> trainable;

  // Adds all of it, in order.
  void Describe(ModelMetadata& metadata) const;

  // Throws ConfigurationError, which names two tensors, when the tensors are on more than one
  // device, or on another type of device than `device` is.
  void CheckDevices(at::Device device, const std::string& backend) const;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_TENSORS_H_
