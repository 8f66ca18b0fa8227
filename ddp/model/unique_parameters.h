// Free of torch/nn.
#ifndef DDP_MODEL_UNIQUE_PARAMETERS_H_
#define DDP_MODEL_UNIQUE_PARAMETERS_H_

#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// Finds the tensors that it has seen before. Undefined tensors are all new.
class SeenTensors {
 public:
  bool IsNew(const at::Tensor& tensor) {
    return !tensor.defined() || seen_.insert(tensor.unsafeGetTensorImpl()).second;
  }

 private:
  std::unordered_set<const at::TensorImpl*> seen_;
};

// Return the parameters of a module without repeats, as PyTorch's Module.parameters() does. In
// LibTorch, a tensor with several names (a tied weight) is in the list once for each name, and an
// optimizer of that list steps it once for each. The first name stays.
inline std::vector<at::Tensor> UniqueParameters(const std::vector<at::Tensor>& all) {
  SeenTensors seen;
  std::vector<at::Tensor> unique;
  for (const at::Tensor& tensor : all) {
    if (seen.IsNew(tensor)) unique.push_back(tensor);
  }
  return unique;
}

// `Parameters` is LibTorch's ordered dictionary from names to tensors.
template <typename Parameters>
Parameters UniqueNamedParameters(const Parameters& all) {
  SeenTensors seen;
  Parameters unique;
  for (const auto& item : all) {
    if (seen.IsNew(item.value())) unique.insert(item.key(), item.value());
  }
  return unique;
}

}  // namespace ddp::internal

#endif  // DDP_MODEL_UNIQUE_PARAMETERS_H_
