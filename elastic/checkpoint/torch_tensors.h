#ifndef DDP_ELASTIC_CHECKPOINT_TORCH_TENSORS_H_
#define DDP_ELASTIC_CHECKPOINT_TORCH_TENSORS_H_

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/manifest.h"
#include "elastic/checkpoint/tensor_view.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::elastic {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The tensors of a model, each once. Of tensors that share their memory (tied weights) the first
// name counts; the others are its aliases.
struct ModelTensors {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  std::map<std::string, std::string> aliases;
  // Of every parameter and buffer. Tensors that are one object under several names have the first
  // of them; tensors that only share their memory (set_data) have each their own.
  std::unordered_map<const c10::TensorImpl*, std::string> parameter_names;
};
ModelTensors TensorsOf(const torch::nn::Module& model);

// The format's words for a tensor. kInvalidArgument, naming it, when the format has none (sparse,
// quantized, without memory, an element type it lacks).
absl::StatusOr<TensorType> TypeOf(const NamedTensor& tensor);

// The values of `tensors`, in host memory and row by row. Where they are so already there is no
// copy; else `keep` owns it. The views live as long as the tensors and `keep`.
absl::StatusOr<std::vector<TensorView>> ViewsOf(const std::vector<NamedTensor>& tensors,
                                                std::vector<at::Tensor>& keep);

// A tensor over `view`'s memory, which must outlive it.
at::Tensor TensorOver(const TensorView& view);

// What of `manifest`'s model does not fit `model`, one line each.
std::vector<std::string> ModelMismatches(const ModelTensors& model, const Manifest& manifest);

// Whether LoadModel can copy every value. kFailedPrecondition names a tensor whose memory cannot
// hold its value: an expanded tensor (a stride of 0) with values that differ along that dimension,
// or an inference tensor.
absl::Status CheckLoadable(const ModelTensors& model,
                           const std::map<std::string, std::string>& aliases,
                           const std::map<std::string, TensorView>& values);

// Copies into `model`'s memory. `values` is of a manifest without mismatches, and loadable.
void LoadModel(const ModelTensors& model, const std::map<std::string, std::string>& aliases,
               const std::map<std::string, TensorView>& values);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_TORCH_TENSORS_H_
