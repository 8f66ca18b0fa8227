#include "ddp/comm/shared_memory/batch_work.h"

#include <exception>
#include <iterator>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "ddp/comm/shared_memory/tensor_reduction.h"

namespace ddp::internal {

std::span<const std::byte> Batch::In(const at::Tensor& tensor) {
  kept.push_back(tensor.contiguous());
  return BytesOf(kept.back());
}

std::span<std::byte> Batch::Out(const at::Tensor& tensor, bool with_contents) {
  kept.push_back(DenseOut(tensor, with_contents));
  return BytesOf(kept.back());
}

at::Tensor Batch::DenseOut(const at::Tensor& tensor, bool with_contents) {
  if (tensor.is_contiguous()) return tensor;
  at::Tensor dense =
      with_contents ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
  after.emplace_back([tensor, dense] { tensor.copy_(dense); });
  return dense;
}

void Batch::Append(Batch other) {
  const auto move_all = [](auto& from, auto& to) {
    std::move(from.begin(), from.end(), std::back_inserter(to));
  };
  move_all(other.requests, requests);
  move_all(other.after, after);
  move_all(other.kept, kept);
}

BatchWork::BatchWork(int rank, Batch batch, size_t collectives,
                     std::weak_ptr<CollectiveEngine> engine, bool hurries)
    : SharedMemoryWork(rank, batch.type, std::move(engine), std::move(batch.results), hurries),
      after_(std::move(batch.after)),
      kept_(std::move(batch.kept)),
      missing_(collectives) {}

void BatchWork::EndOne(const absl::Status& status) {
  if (!status.ok()) {
    MutexLock lock(mutex_);
    status_.Update(status);
  }
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) EndAll();
}

void BatchWork::EndAll() {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    status = status_;
  }
  if (status.ok() && !after_.empty()) {
    const at::NoGradGuard no_grad;
    try {
      for (const auto& after : after_) after();
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
  }
  after_.clear();
  kept_.clear();
  Complete(status);
}

}  // namespace ddp::internal
