// Checks of models for tests of distributed training, for use in a rank's body.
#ifndef DDP_TESTING_DISTRIBUTED_CHECKS_H_
#define DDP_TESTING_DISTRIBUTED_CHECKS_H_

#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "ddp/common/error.h"
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
  torch::Tensor zero = mine.clone().to(group.device());
  group.broadcast(zero, 0);
  torch::Tensor differing =
      torch::full({1}, !torch::equal(mine, zero.to(mine.device())), torch::kInt64)
          .to(group.device());
  group.all_reduce(differing);
  return differing.item<int64_t>() == 0;
}

// Returns the error that a rank gets when a peer fails in its `step`. On a device with streams, a
// rank is ahead of its sums: it waits for them, and one of the next steps has the error.
template <typename Error, typename Step>
std::string ErrorOfPeer(const ProcessGroup& group, const Step& step) {
  std::string error = ErrorOf<Error>(step);
  for (int i = 0; i < 100 && !group.device().is_cpu() && error == "no error"; ++i) {
    torch::ones({1}, group.device()).item<float>();
    error = ErrorOf<Error>(step);
  }
  return error;
}

// Takes the step that throws on all ranks after such an error, where one had gone on with sums that
// were aborted. See ProcessGroup.
template <typename Step>
void StepAfterFailure(const ProcessGroup& group, const Step& step) {
  if (!group.device().is_cpu()) ErrorOf<ReductionError>(step);
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_DISTRIBUTED_CHECKS_H_
