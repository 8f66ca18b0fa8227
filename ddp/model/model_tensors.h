#ifndef DDP_MODEL_MODEL_TENSORS_H_
#define DDP_MODEL_MODEL_TENSORS_H_

#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/model/model_metadata.h"
#include "ddp/model/model_view.h"

namespace ddp::internal {

class Communicator;
struct CoalescedBroadcastOptions;

// A parameter that requires a gradient.
struct TrainableParameter {
  std::string name;  // of a shared tensor: the first name that is not ignored
  at::Tensor tensor;
  bool sparse = false;  // true: its gradient will be sparse
};

// The parameters and buffers of a model that a wrapper handles, in the order of registration.
struct ModelTensors {
  // Reads `model`. Leaves out undefined tensors and names in `ignored`. Throws ConfigurationError
  // for an ignored name that the module does not have.
  static ModelTensors Of(const ModelView& model, const std::set<std::string>& ignored);

  std::vector<NamedTensor> parameters;  // a shared tensor is there once for each name
  std::vector<NamedTensor> buffers;

  // The parameters that require a gradient; a shared tensor under its first name only.
  std::vector<TrainableParameter> trainable;

  // Adds all parameters and buffers to `metadata`, in order.
  void Describe(ModelMetadata& metadata) const;

  // Throws ConfigurationError when a tensor is sparse or quantized, or the tensors are on more than
  // one device, or on another one than `device`. The message names the tensors.
  void CheckDevices(at::Device device, const std::string& backend) const;
};

// Does BroadcastCoalesced() (ddp/transfer/coalesced_broadcast.h) with `tensors` and their names.
void Broadcast(Communicator& communicator, const std::vector<NamedTensor>& tensors,
               const CoalescedBroadcastOptions& options);

}  // namespace ddp::internal

#endif  // DDP_MODEL_MODEL_TENSORS_H_
