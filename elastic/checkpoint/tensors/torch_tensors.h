#ifndef DDP_ELASTIC_CHECKPOINT_TENSORS_TORCH_TENSORS_H_
#define DDP_ELASTIC_CHECKPOINT_TENSORS_TORCH_TENSORS_H_

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/tensor_view.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::elastic {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The tensors of a model, each once. Tied tensors (tied weights) share their memory: they are
// listed under the first name, and the other names are aliases.
struct ModelTensors {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  std::map<std::string, std::string> aliases;  // other name -> first name
  // The name of every parameter and buffer. One tensor object under several names has the first
  // name. Tensor objects that only share memory (set_data) keep their own names.
  std::unordered_map<const c10::TensorImpl*, std::string> parameter_names;
};
ModelTensors TensorsOf(const torch::nn::Module& model);

// Returns the tensor's type in the format. Errors: kInvalidArgument, naming the tensor, when the
// format has no such type: sparse, quantized, without memory, or an unknown element type.
absl::StatusOr<TensorType> TypeOf(const NamedTensor& tensor);

// Returns views of the values of `tensors`, in host memory and row by row. A tensor on another
// device or in another layout is copied, and `keep` owns the copy. The views are valid as long as
// `tensors` and `keep`.
absl::StatusOr<std::vector<TensorView>> ViewsOf(const std::vector<NamedTensor>& tensors,
                                                std::vector<at::Tensor>& keep);

// Returns views of the same names and types without values.
absl::StatusOr<std::vector<TensorView>> FormsOf(const std::vector<NamedTensor>& tensors);

// Returns a tensor over the memory of `view`, which must outlive the tensor.
at::Tensor TensorOver(const TensorView& view);

// Returns the differences between `manifest`'s model and `model`, one line each.
std::vector<std::string> ModelMismatches(const ModelTensors& model, const Manifest& manifest);

// Returns OK when LoadModel() can copy every value. Errors: kFailedPrecondition, naming the tensor,
// when it is an inference tensor, or an expanded tensor (a stride of 0) whose new values differ
// along that dimension.
absl::Status CheckLoadable(const ModelTensors& model,
                           const std::map<std::string, std::string>& aliases,
                           const std::map<std::string, TensorView>& values);

// Copies `values` into the memory of `model`. The caller has checked ModelMismatches() and
// CheckLoadable().
void LoadModel(const ModelTensors& model, const std::map<std::string, std::string>& aliases,
               const std::map<std::string, TensorView>& values);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_TENSORS_TORCH_TENSORS_H_
