#ifndef DDP_COMM_SHARED_MEMORY_SHARED_MEMORY_WORK_H_
#define DDP_COMM_SHARED_MEMORY_SHARED_MEMORY_WORK_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {

// An operation of the shared-memory backend. Thread-safe.
class SharedMemoryWork : public c10d::Work {
 public:
  // `hurries`: the group's thread takes the operation up as soon as a program asks for its future.
  // Otherwise waits through the traits' `drive` advance it.
  SharedMemoryWork(int rank, c10d::OpType type, std::weak_ptr<CollectiveEngine> engine,
                   std::vector<at::Tensor> results, bool hurries);

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

  // To be called once, by the engine's thread of the moment.
  void Complete(const absl::Status& status);
  int* source() { return &source_; }

 private:
  const std::weak_ptr<CollectiveEngine> engine_;
  const std::vector<at::Tensor> results_;
  const bool hurries_;
  int source_ = -1;
  std::atomic<bool> done_ = false;
  std::atomic<bool> failed_ = false;  // set before done_

  mutable Mutex mutex_;
  std::exception_ptr error_ ABSL_GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10::ivalue::Future> future_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_SHARED_MEMORY_WORK_H_
