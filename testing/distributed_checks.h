// Checks of models for tests of distributed training, for use in a rank's body.
#ifndef DDP_TESTING_DISTRIBUTED_CHECKS_H_
#define DDP_TESTING_DISTRIBUTED_CHECKS_H_

#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "ddp/process_group.h"
#include "testing/error_of.h"  // IWYU pragma: export

namespace ddp::testing {

// Returns all elements as doubles, in one row. A complex number gives two.
inline torch::Tensor Flatten(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> parts = {torch::zeros({0}, torch::kDouble)};
  for (const torch::Tensor& tensor : tensors) {
    torch::Tensor plain = tensor.detach();
    if (plain.is_sparse()) plain = plain.to_dense();
    if (plain.is_complex()) plain = torch::view_as_real(plain);
    parts.push_back(plain.to(torch::kDouble).reshape({-1}));
  }
  return torch::cat(parts);
}

// Returns the gradients of all parameters that have one, as Flatten() does.
inline torch::Tensor Gradients(const torch::nn::Module& module) {
  std::vector<torch::Tensor> gradients;
  for (const torch::Tensor& parameter : module.parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return Flatten(gradients);
}

// Returns true when all ranks hold the same elements as rank 0. A collective: call it on all ranks.
inline bool SameOnAllRanks(ProcessGroup& group, const torch::Tensor& mine) {
  torch::Tensor zero = mine.clone();
  group.broadcast(zero, 0);
  torch::Tensor differing = torch::tensor({torch::equal(mine, zero) ? 0 : 1});
  group.all_reduce(differing);
  return differing.item<int64_t>() == 0;
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_DISTRIBUTED_CHECKS_H_
