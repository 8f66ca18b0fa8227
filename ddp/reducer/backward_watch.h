#ifndef DDP_REDUCER_BACKWARD_WATCH_H_
#define DDP_REDUCER_BACKWARD_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "ddp/reducer/engine_lock.h"
#include "ddp/reducer/pass/forward_record.h"

namespace ddp::internal {

// Throws ConfigurationError when the event of a distributed autograd context on this thread belongs
// to a forward under no_sync. Later contexts would not see the gradients of this one.
void CheckForwardInContext(const ForwardRecord& record);

// Tells an observer when a backward through the outputs of watched forwards begins, and whether it
// ends well or by an exception. Records through which forwards the backward goes. Owned by a
// Reducer.
//
// Autograd has no such events. So the watch puts a hook on every output that has a history. The
// first hook of a backward adds a callback to the backward's graph task. Autograd calls the
// callback at a good end. After an exception it destroys the callback without a call, and the watch
// notices that.
//
// The backward of a distributed autograd context (GradientContext) may fail before it comes to an
// output, because another worker failed. For a synchronized forward in its graph, the watch then
// calls OnBackwardBegin() and OnBackwardException().
//
// A backward that runs inside another one (re-entrant checkpointing) does not pass the outputs
// again. The watch sees only the outer one.
//
// Thread-compatible: a forward and a backward never use it at once, except under the EngineLock.
class BackwardWatch {
 public:
  class Observer {
   public:
    // Called before the backward runs any operation of the forward.
    virtual void OnBackwardBegin() = 0;
    // Called at the end, after all gradients. An exception of this function leaves backward().
    virtual void OnBackwardEnd() = 0;
    // Called while an exception unwinds the backward.
    virtual void OnBackwardException() = 0;

   protected:
    ~Observer() = default;
  };

  // The current backward, and the synchronized forwards through which it has gone so far.
  struct Backward {
    int task = -1;  // autograd's number; -1: no backward through a watched output
    std::vector<std::shared_ptr<ForwardRecord>> synchronized;
    bool collectives = false;  // some forward that it has gone through has `collectives`
  };

  // `observer` must outlive the watch, which takes `lock` around the observer's calls. Outputs may
  // outlive both. After the watch has ended, a
  // backward through an output of a synchronized forward that is not reduced throws ReductionError:
  // its gradients would stay on this rank. torch::autograd::grad() still works.
  BackwardWatch(Observer* observer, std::shared_ptr<EngineLock> lock);
  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  // Registers a hook on every output that has a history. Returns true when each output that
  // requires a gradient has a hook: then the watch sees every backward from these outputs.
  bool Watch(const std::vector<at::Tensor>& outputs, const std::shared_ptr<ForwardRecord>& record);

  const Backward& current() const { return current_; }

  // Blocks until the last backward has ended on autograd's threads: on a device, backward() may
  // throw before. Returns at once within a backward, and without a lock.
  void AwaitEnd() const;

 private:
  class Token;
  // Shared with hooks and callbacks, which may outlive the watch.
  struct Self {
    std::shared_ptr<EngineLock> lock;
    BackwardWatch* watch = nullptr;  // null: it has ended
  };

  void Begin(int task);
  // Throws ConfigurationError as CheckForwardInContext().
  void Enter(const std::shared_ptr<ForwardRecord>& record, size_t output);
  void AddSynchronized(const std::shared_ptr<ForwardRecord>& record);
  void RecordCreatedNodes() const;
  static void OnContextFailure();
  void Leave(int task, bool with_exception);

  Observer* const observer_;
  const std::shared_ptr<Self> self_;
  const std::shared_ptr<BackwardWatch*> alive_;  // held weakly by the list of forwards
  Backward current_;
  mutable Mutex left_mutex_;
  mutable CondVar left_;  // after an exception

  // Of the current backward.
  bool creates_graph_ = false;
  uint64_t thread_ = 0;
  uint64_t first_node_ = 0;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BACKWARD_WATCH_H_
