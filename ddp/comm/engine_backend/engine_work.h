#ifndef DDP_COMM_ENGINE_BACKEND_ENGINE_WORK_H_
#define DDP_COMM_ENGINE_BACKEND_ENGINE_WORK_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "ddp/comm/hierarchical/rank_engine.h"
#include "ddp/comm/shared_memory/collective_engine.h"

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
};

// The Work of a Batch, or of a message: complete when all of its operations are. Thread-safe.
class EngineWork final : public c10d::Work {
 public:
  // `operations`: how many calls of EndOne() there will be. Ignores `batch.requests`. `hurries`:
  // the group's thread takes the operation up as soon as a program asks for its future. Otherwise
  // waits through the traits' `drive` advance it.
  EngineWork(int rank, Batch batch, size_t operations, std::weak_ptr<RankEngine> engine,
             bool hurries);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return results_; }
  // Blocks, and does the work on this thread. Throws c10::DistBackendError when the operation fails
  // or `timeout` passes; a timeout leaves the operation as it is.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // To be called once for each operation, when it has ended, by the engine's thread of the moment.
  void EndOne(const absl::Status& status);
  int* source() { return &source_; }

 private:
  bool done() const { return done_.load(std::memory_order_acquire); }
  void EndAll();
  void Complete(c10::ivalue::Future& future, const std::exception_ptr& error) const;

  const std::weak_ptr<RankEngine> engine_;
  const std::vector<at::Tensor> results_;
  const bool hurries_;
  int source_ = -1;

  // Until the last operation has ended.
  std::vector<std::function<void()>> after_;
  absl::InlinedVector<at::Tensor, 2> kept_;
  std::atomic<size_t> missing_;

  std::atomic<bool> done_ = false;
  std::atomic<bool> failed_ = false;  // set before done_
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::exception_ptr error_ ABSL_GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10::ivalue::Future> future_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ENGINE_BACKEND_ENGINE_WORK_H_
