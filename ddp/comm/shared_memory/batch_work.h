#ifndef DDP_COMM_SHARED_MEMORY_BATCH_WORK_H_
#define DDP_COMM_SHARED_MEMORY_BATCH_WORK_H_

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "ddp/comm/shared_memory/shared_memory_work.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"

namespace ddp::internal {

// The collectives of one call on the backend, which are one Work.
struct Batch {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  absl::InlinedVector<CollectiveRequest, 1> requests;
  std::vector<std::function<void()>> after;  // on success, in this order
  absl::InlinedVector<at::Tensor, 2> kept;   // until the end
  std::vector<at::Tensor> results;

  // Return memory without gaps for the tensor: its own, or that of a copy. `after` copies a result
  // back.
  std::span<const std::byte> In(const at::Tensor& tensor);
  std::span<std::byte> Out(const at::Tensor& tensor, bool with_contents = false);

  // Returns a tensor without gaps whose contents are in `tensor` at the end.
  at::Tensor DenseOut(const at::Tensor& tensor, bool with_contents = false);

  // Adds all of another batch but its type and its results.
  void Append(Batch other);
};

// The Work of a Batch: complete when all of its collectives are. Thread-safe.
class BatchWork final : public SharedMemoryWork {
 public:
  // `collectives`: how many calls of EndOne() there will be. Ignores `batch.requests`. `engine` and
  // `hurries` as in SharedMemoryWork.
  BatchWork(int rank, Batch batch, size_t collectives, std::weak_ptr<CollectiveEngine> engine,
            bool hurries);

  // To be called once for each collective, when it has ended.
  void EndOne(const absl::Status& status);

 private:
  void EndAll();

  // Until the last collective has ended.
  std::vector<std::function<void()>> after_;
  absl::InlinedVector<at::Tensor, 2> kept_;

  std::atomic<size_t> missing_;
  Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

inline std::span<const std::byte> Batch::In(const at::Tensor& tensor) {
  kept.push_back(tensor.contiguous());
  return BytesOf(kept.back());
}

inline std::span<std::byte> Batch::Out(const at::Tensor& tensor, bool with_contents) {
  kept.push_back(DenseOut(tensor, with_contents));
  return BytesOf(kept.back());
}

inline at::Tensor Batch::DenseOut(const at::Tensor& tensor, bool with_contents) {
  if (tensor.is_contiguous()) return tensor;
  at::Tensor dense =
      with_contents ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
  after.emplace_back([tensor, dense] { tensor.copy_(dense); });
  return dense;
}

inline void Batch::Append(Batch other) {
  const auto move_all = [](auto& from, auto& to) {
    std::move(from.begin(), from.end(), std::back_inserter(to));
  };
  move_all(other.requests, requests);
  move_all(other.after, after);
  move_all(other.kept, kept);
}

inline BatchWork::BatchWork(int rank, Batch batch, size_t collectives,
                            std::weak_ptr<CollectiveEngine> engine, bool hurries)
    : SharedMemoryWork(rank, batch.type, std::move(engine), std::move(batch.results), hurries),
      after_(std::move(batch.after)),
      kept_(std::move(batch.kept)),
      missing_(collectives) {}

inline void BatchWork::EndOne(const absl::Status& status) {
  if (!status.ok()) {
    MutexLock lock(mutex_);
    status_.Update(status);
  }
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) EndAll();
}

inline void BatchWork::EndAll() {
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

#endif  // DDP_COMM_SHARED_MEMORY_BATCH_WORK_H_
