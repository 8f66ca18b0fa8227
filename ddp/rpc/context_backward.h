#ifndef DDP_RPC_CONTEXT_BACKWARD_H_
#define DDP_RPC_CONTEXT_BACKWARD_H_

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/rpc/graph_walk.h"

namespace torch::distributed::autograd {
class DistAutogradContext;
}  // namespace torch::distributed::autograd

namespace ddp::rpc::internal {

// The events of one backward. Shared, because a node of a backward that has failed may still run,
// and call its hooks, after the caller has gone on. Thread-safe.
class EventQueue final : public ddp::internal::GradientEvents {
 public:
  struct Event {
    std::function<void()> run;
    const GraphWalk::Node* accumulator;
  };

  void Post(std::function<void()> event, const GraphWalk::Node* accumulator) override;
  // Drops all later events.
  void Close();
  // Blocks until there is an event. Returns nullopt when the queue is closed and empty.
  std::optional<Event> Next();

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// One backward of a distributed autograd context, as the reducers of this process see it.
//
// LibTorch's engine runs on a thread of its own, "ddp-rpc-back", and on the inter-op pool. Hooks of
// the library post events. The caller of Run() does them meanwhile. So reducers run on the caller's
// thread only, no pool thread ever waits, and exceptions of a reducer keep their types.
//
// Thread: the owner's.
class ContextBackward final : public ddp::internal::GradientContext {
 public:
  using Context = std::shared_ptr<torch::distributed::autograd::DistAutogradContext>;

  // `walk`: from the roots and from the messages of the context; outlives this object. `root`: one
  // of the roots.
  ContextBackward(Context context, const GraphWalk& walk, at::Tensor root);
  ~ContextBackward();

  // The two exceptions with which a backward may end.
  struct Ends {
    std::exception_ptr engine;
    std::exception_ptr reducer;
  };
  // Runs the engine and the events. Blocks until both have ended.
  Ends Run(std::function<void()> engine);

  void AtEnd(std::function<void()> function) override;
  at::Tensor Gradient(const at::Tensor& leaf) override;
  void SetGradient(const at::Tensor& leaf, at::Tensor gradient) override;
  int task() const override { return task_; }
  std::string failure() const override { return failure_; }
  const std::vector<const GraphWalk::Node*>& nodes() const override { return walk_.nodes(); }
  bool Reaches(const GraphWalk::Node* node) const override { return walk_.Reaches(node); }

  // Makes the hooks of this process find their contexts. Call it when the process becomes a worker.
  static void Install();

 private:
  static std::shared_ptr<ddp::internal::GradientEvents> FindEvents();
  bool HasGradient(const at::Tensor& leaf) const;
  void RunEvents(std::exception_ptr* error);
  void RunAtEnd(std::exception_ptr* error);

  const Context context_;
  const GraphWalk& walk_;
  const at::Tensor root_;
  const int task_;
  const std::shared_ptr<EventQueue> events_ = std::make_shared<EventQueue>();
  absl::flat_hash_set<const c10::TensorImpl*> at_start_;  // leaves with a gradient before
  absl::flat_hash_set<const GraphWalk::Node*> arrived_;   // of those with one from this backward
  bool engine_ended_ = false;
  std::string failure_;
  std::vector<std::function<void()>> at_end_;
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_CONTEXT_BACKWARD_H_
