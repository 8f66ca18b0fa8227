#include "ddp/comm/hierarchical/flat_exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <numeric>
#include <span>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "ddp/comm/hierarchical/gloo_link.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"

namespace ddp::internal {
namespace {

using Tensors = FlatExchange::Tensors;

// A tensor of one element has no gaps, whatever its stride says.
at::Tensor ViewAsBytes(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
}

void CopyRows(const at::Tensor& all, const Tensors& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].copy_(all[static_cast<int64_t>(i)].view(outputs[i].sizes()));
  }
}

std::vector<int64_t> BytesOfEach(const Tensors& tensors) {
  std::vector<int64_t> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
  return bytes;
}

}  // namespace

// The end of an operation, which its thread waits for. The operation's continuation may run after
// End().
struct FlatExchange::Waiting {
  Mutex mutex;
  CondVar changed;
  bool done ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;
};

FlatExchange::FlatExchange(c10::intrusive_ptr<c10d::Backend> gloo)
    : gloo_(std::move(gloo)),
      rank_(gloo_->getRank()),
      size_(gloo_->getSize()),
      waiting_(std::make_shared<Waiting>()) {}

void FlatExchange::End() {
  MutexLock lock(waiting_->mutex);
  waiting_->ended = true;
  waiting_->changed.NotifyAll();
}

absl::Status FlatExchange::GatherDense(const at::Tensor& input, const at::Tensor& output,
                                       absl::Time deadline) {
  if (input.numel() == 0) return absl::OkStatus();
  return Run(deadline, [&](c10d::Backend& gloo) {
    at::Tensor from = ViewAsBytes(input);
    at::Tensor to = ViewAsBytes(output);
    return gloo._allgather_base(to, from, c10d::AllgatherOptions());
  });
}

absl::Status FlatExchange::GatherToRoot(const at::Tensor& input, const Tensors& outputs, int root,
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

absl::Status FlatExchange::Scatter(const Tensors& inputs, const at::Tensor& output, int root,
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

absl::Status FlatExchange::AllToAll(const Tensors& inputs, const Tensors& outputs,
                                    absl::Time deadline) {
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

absl::Status FlatExchange::SumSparse(const at::Tensor& target, bool average, absl::Time deadline) {
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

absl::Status FlatExchange::CheckSizes(const std::vector<int64_t>& sent,
                                      const std::vector<int64_t>& received, absl::Time deadline) {
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
      return absl::InvalidArgumentError(absl::StrCat("rank ", from, " gives rank ", to, " ", gives,
                                                     " bytes, and rank ", to, " takes ", takes));
    }
  }
  return absl::OkStatus();
}

absl::Status FlatExchange::Run(absl::Time deadline, const Launch& launch) {
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

}  // namespace ddp::internal
