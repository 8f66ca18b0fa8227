#ifndef DDP_COMM_SHARED_MEMORY_BATCH_WORK_H_
#define DDP_COMM_SHARED_MEMORY_BATCH_WORK_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "ddp/comm/shared_memory/shared_memory_work.h"

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

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_BATCH_WORK_H_
