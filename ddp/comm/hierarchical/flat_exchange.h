// The collectives that have no hierarchy: bytes that travel once, by one Gloo over all ranks.
#ifndef DDP_COMM_HIERARCHICAL_FLAT_EXCHANGE_H_
#define DDP_COMM_HIERARCHICAL_FLAT_EXCHANGE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "ddp/comm/hierarchical/gloo_link.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"

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

  explicit FlatExchange(c10::intrusive_ptr<c10d::Backend> gloo)
      : gloo_(std::move(gloo)), rank_(gloo_->getRank()), size_(gloo_->getSize()) {}

  // Fails the operation in progress and all later ones. To be called after the end of the
  // connections: Gloo does not fail an operation when a part of a message has arrived.
  void End() {
    MutexLock lock(waiting_->mutex);
    waiting_->ended = true;
    waiting_->changed.NotifyAll();
  }

  // Puts the inputs of all ranks, one after the other, into `output`. Both are dense, and the
  // inputs of all ranks have one size.
  absl::Status GatherDense(const at::Tensor& input, const at::Tensor& output, absl::Time deadline) {
    if (input.numel() == 0) return absl::OkStatus();
    return Run(deadline, [&](c10d::Backend& gloo) {
      at::Tensor from = ViewAsBytes(input);
      at::Tensor to = ViewAsBytes(output);
      return gloo._allgather_base(to, from, c10d::AllgatherOptions());
    });
  }

  // Copies the input of each rank into the root's output of that rank's number. The other ranks
  // have no outputs.
  absl::Status GatherToRoot(const at::Tensor& input, const Tensors& outputs, int root,
                            absl::Time deadline) {
    if (input.numel() == 0) return absl::OkStatus();
    Tensors from = {ViewAsBytes(input.contiguous())};
    const int64_t rows = rank_ == root ? size_ : 0;
    const at::Tensor all = at::empty({rows, input.numel()}, input.options());
    std::vector<Tensors> to;
    if (rank_ == root) to.resize(1);
    for (int64_t rank = 0; rank < rows; ++rank) to[0].push_back(ViewAsBytes(all[rank]));
    c10d::GatherOptions options;
    options.rootRank = root;
    DDP_RETURN_IF_ERROR(
        Run(deadline, [&](c10d::Backend& gloo) { return gloo.gather(to, from, options); }));
    CopyRows(all, outputs);
    return absl::OkStatus();
  }

  // Copies the root's input of each rank's number into that rank's output. The other ranks have no
  // inputs.
  absl::Status Scatter(const Tensors& inputs, const at::Tensor& output, int root,
                       absl::Time deadline) {
    if (output.numel() == 0) return absl::OkStatus();
    const at::Tensor dense = at::empty({output.numel()}, output.options());
    Tensors to = {ViewAsBytes(dense)};
    std::vector<Tensors> from;
    if (rank_ == root) from.resize(1);
    for (const at::Tensor& input : inputs) from[0].push_back(ViewAsBytes(input.contiguous()));
    c10d::ScatterOptions options;
    options.rootRank = root;
    DDP_RETURN_IF_ERROR(
        Run(deadline, [&](c10d::Backend& gloo) { return gloo.scatter(to, from, options); }));
    output.copy_(dense.view(output.sizes()));
    return absl::OkStatus();
  }

  // Copies the n-th input of each rank into rank n's output of that rank's number. The sizes of an
  // input and its output must be equal; otherwise kInvalidArgument, on all ranks.
  absl::Status AllToAll(const Tensors& inputs, const Tensors& outputs, absl::Time deadline) {
    std::vector<int64_t> sent = BytesOfEach(inputs);
    std::vector<int64_t> received = BytesOfEach(outputs);
    DDP_RETURN_IF_ERROR(CheckSizes(sent, received, deadline));
    at::Tensor from = at::empty({std::accumulate(sent.begin(), sent.end(), int64_t{0})}, at::kByte);
    at::Tensor to =
        at::empty({std::accumulate(received.begin(), received.end(), int64_t{0})}, at::kByte);
    int64_t offset = 0;
    for (const at::Tensor& input : inputs) {
      const at::Tensor bytes = ViewAsBytes(input.contiguous());
      from.narrow(0, offset, bytes.numel()).copy_(bytes);
      offset += bytes.numel();
    }
    DDP_RETURN_IF_ERROR(Run(deadline, [&](c10d::Backend& gloo) {
      return gloo.alltoall_base(to, from, received, sent, c10d::AllToAllOptions());
    }));
    const auto* next = static_cast<const std::byte*>(to.const_data_ptr());
    for (const at::Tensor& output : outputs) {
      const at::Tensor dense = at::empty(output.sizes(), output.options());
      if (dense.nbytes() > 0) std::memcpy(dense.mutable_data_ptr(), next, dense.nbytes());
      next += dense.nbytes();
      output.copy_(dense);
    }
    return absl::OkStatus();
  }

  // Puts the sum of all ranks' sparse tensors into `target`: indices and values are gathered, and
  // each rank adds them in the order of ReduceTree().
  absl::Status SumSparse(const at::Tensor& target, bool average, absl::Time deadline) {
    const at::Tensor mine = target.coalesce();
    const at::Tensor blob = BytesOfSparse(mine);
    at::Tensor bytes = at::empty({1}, at::kLong);
    *bytes.mutable_data_ptr<int64_t>() = blob.numel();
    const at::Tensor bytes_of_all = at::empty({size_}, at::kLong);
    DDP_RETURN_IF_ERROR(GatherDense(bytes, bytes_of_all, deadline));
    const std::span<const int64_t> counts(bytes_of_all.const_data_ptr<int64_t>(), size_);
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    const at::Tensor padded = at::empty({longest}, at::kByte);
    padded.narrow(0, 0, blob.numel()).copy_(blob);
    const at::Tensor all = at::empty({size_, longest}, at::kByte);
    DDP_RETURN_IF_ERROR(GatherDense(padded, all, deadline));
    Tensors parts;
    for (int rank = 0; rank < size_; ++rank) parts.push_back(all[rank].narrow(0, 0, counts[rank]));
    at::Tensor sum = SumOfSparse(parts, mine, 0, parts.size());
    if (average) sum = sum.div(size_);
    target.copy_(sum);
    return absl::OkStatus();
  }

 private:
  // A tensor of one element has no gaps, whatever its stride says.
  static at::Tensor ViewAsBytes(const at::Tensor& dense) {
    return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
  }

  static void CopyRows(const at::Tensor& all, const Tensors& outputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].copy_(all[static_cast<int64_t>(i)].view(outputs[i].sizes()));
    }
  }

  static std::vector<int64_t> BytesOfEach(const Tensors& tensors) {
    std::vector<int64_t> bytes;
    for (const at::Tensor& tensor : tensors) bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    return bytes;
  }

  // Compares the sizes that all ranks send and receive: Gloo would end the process.
  absl::Status CheckSizes(const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                          absl::Time deadline) {
    const at::Tensor mine = at::empty({2 * size_}, at::kLong);
    std::copy(sent.begin(), sent.end(), mine.mutable_data_ptr<int64_t>());
    std::copy(received.begin(), received.end(), mine.mutable_data_ptr<int64_t>() + size_);
    const at::Tensor all = at::empty({size_, 2 * size_}, at::kLong);
    DDP_RETURN_IF_ERROR(GatherDense(mine, all, deadline));
    const auto* const sizes = all.const_data_ptr<int64_t>();
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        const int64_t gives = sizes[from * 2 * size_ + to];
        const int64_t takes = sizes[to * 2 * size_ + size_ + from];
        if (gives == takes) continue;
        return absl::InvalidArgumentError(absl::StrCat("rank ", from, " gives rank ", to, " ",
                                                       gives, " bytes, and rank ", to, " takes ",
                                                       takes));
      }
    }
    return absl::OkStatus();
  }

  // The end of an operation, which its thread waits for. The operation's continuation may run after
  // End().
  struct Waiting {
    Mutex mutex;
    CondVar changed;
    bool done ABSL_GUARDED_BY(mutex) = false;
    bool ended ABSL_GUARDED_BY(mutex) = false;
  };

  // Runs an operation of the Gloo: launch(gloo). The operation keeps its tensors, also after an
  // early return.
  template <typename Launch>
  absl::Status Run(absl::Time deadline, const Launch& launch) {
    c10::intrusive_ptr<c10d::Work> work;
    {
      MutexLock lock(waiting_->mutex);
      waiting_->done = false;
    }
    {
      MutexLock lock(*GlooTraits().launch_mutex);
      work = launch(*gloo_);
    }
    const auto future = work->getFuture();
    future->addCallback([waiting = waiting_](c10::ivalue::Future&) {
      MutexLock lock(waiting->mutex);
      waiting->done = true;
      waiting->changed.NotifyAll();
    });
    const MonotonicClock clock;
    MutexLock lock(waiting_->mutex);
    while (!waiting_->done) {
      if (waiting_->ended) return absl::UnavailableError("Connection closed: the group ends");
      const absl::Duration left = deadline - clock.Now();
      if (left <= absl::ZeroDuration()) {
        return absl::DeadlineExceededError("Timed out waiting for the ranks of all hosts");
      }
      (void)waiting_->changed.WaitFor(waiting_->mutex, left);
    }
    if (!future->hasError()) return absl::OkStatus();
    try {
      std::rethrow_exception(future->exception_ptr());
    } catch (const std::exception& error) {
      return StatusOf(error);
    }
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int rank_;
  const int size_;
  const std::shared_ptr<Waiting> waiting_ = std::make_shared<Waiting>();
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_FLAT_EXCHANGE_H_
