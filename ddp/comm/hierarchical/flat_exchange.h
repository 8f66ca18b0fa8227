// The collectives that have no hierarchy: bytes that travel once, by one Gloo over all ranks.
#ifndef DDP_COMM_HIERARCHICAL_FLAT_EXCHANGE_H_
#define DDP_COMM_HIERARCHICAL_FLAT_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ddp::internal {

// Gathers, scatters and exchanges tensors of any type, as bytes. "Dense" tensors have no gaps; the
// others may have any strides.
//
// Threads: every method but End() blocks, and one thread calls them. All ranks call the same ones
// in the same order. End(): any thread. Errors: kDeadlineExceeded and kUnavailable, after which the
// Gloo is at an end.
class FlatExchange {
 public:
  using Tensors = std::vector<at::Tensor>;

  explicit FlatExchange(c10::intrusive_ptr<c10d::Backend> gloo);

  // Fails the operation in progress and all later ones. To be called after the end of the
  // connections: Gloo does not fail an operation when a part of a message has arrived.
  void End();

  // Puts the inputs of all ranks, one after the other, into `output`. Both are dense, and the
  // inputs of all ranks have one size.
  absl::Status GatherDense(const at::Tensor& input, const at::Tensor& output, absl::Time deadline);

  // Copies the input of each rank into the root's output of that rank's number. The other ranks
  // have no outputs.
  absl::Status GatherToRoot(const at::Tensor& input, const Tensors& outputs, int root,
                            absl::Time deadline);

  // Copies the root's input of each rank's number into that rank's output. The other ranks have no
  // inputs.
  absl::Status Scatter(const Tensors& inputs, const at::Tensor& output, int root,
                       absl::Time deadline);

  // Copies the n-th input of each rank into rank n's output of that rank's number. The sizes of an
  // input and its output must be equal; otherwise kInvalidArgument, on all ranks.
  absl::Status AllToAll(const Tensors& inputs, const Tensors& outputs, absl::Time deadline);

  // Puts the sum of all ranks' sparse tensors into `target`: indices and values are gathered, and
  // each rank adds them in the order of ReduceTree().
  absl::Status SumSparse(const at::Tensor& target, bool average, absl::Time deadline);

 private:
  // Compares the sizes that all ranks send and receive: Gloo would end the process.
  absl::Status CheckSizes(const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                          absl::Time deadline);

  struct Waiting;

  // Runs an operation of the Gloo: launch(gloo). The operation keeps its tensors, also after an
  // early return.
  using Launch = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& gloo)>;
  absl::Status Run(absl::Time deadline, const Launch& launch);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int rank_;
  const int size_;
  const std::shared_ptr<Waiting> waiting_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_FLAT_EXCHANGE_H_
