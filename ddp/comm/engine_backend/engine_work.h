#ifndef DDP_COMM_ENGINE_BACKEND_ENGINE_WORK_H_
#define DDP_COMM_ENGINE_BACKEND_ENGINE_WORK_H_

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/status/status.h"
#include "ddp/comm/hierarchical/rank_engine.h"

namespace ddp::internal {

// The Work of one operation of an engine. Thread-safe.
class EngineWork final : public c10d::Work {
 public:
  struct Operation {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    std::vector<at::Tensor> results;  // of the future
    std::vector<at::Tensor> inputs;   // kept until the end
    std::function<void()> finish;     // on success, before the end; may be null
  };

  EngineWork(int rank, Operation operation, std::weak_ptr<RankEngine> engine);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return results_; }
  // Blocks, and does the work on this thread. Throws a kind of c10::DistError (see
  // operation_fault.h) when the operation fails or `timeout` passes; a timeout leaves the operation
  // as it is.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // To be called once, when the operation has ended, by the engine's thread of the moment.
  void End(absl::Status status);

 private:
  bool done() const { return future_->completed(); }

  const std::weak_ptr<RankEngine> engine_;
  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::vector<at::Tensor> inputs_;  // until the end
  std::function<void()> finish_;    // until the end
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ENGINE_BACKEND_ENGINE_WORK_H_
