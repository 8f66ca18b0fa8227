#ifndef DDP_WORK_H_
#define DDP_WORK_H_

#include <functional>
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/intrusive_ptr.h>

namespace ddp {

// Tensors that are on their way. The future's value is a tensor, or a list of tensors, as c10d's
// own Work gives.
using TensorFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// A collective, or a message, that has started and needs no further call to complete.
//
//   ddp::Work sum = group->all_reduce_async(tensor);
//   ...                       // something else
//   sum.wait();               // from here on `tensor` holds the sum
//
// Until wait() returns, or completed() is true, the tensors of the operation must stay as they are;
// the operation keeps them alive. After wait() has thrown, the operation may still write into them:
// use others. A Work without a waiter completes all the same; its error is the error of the group's
// next collective.
//
// Copies are the same operation. `work->wait()` is `work.wait()`. A Work without an operation, as
// the default constructor makes it, is complete. Thread-compatible: the thread that uses the group
// waits. A Work may outlive its group.
class Work {
 public:
  struct State;  // the library's

  Work() = default;
  explicit Work(std::shared_ptr<State> state);

  // Returns when the result is there: on the CPU the operation is complete, on a GPU the current
  // stream waits for it. Ends early when a peer fails, is gone, or is in another collective, and
  // after the group's timeout: throws PeerFailedError or CommunicationError, as the blocking form
  // does. A second wait() ends as the first did. Throws CommunicationError where the group was
  // renewed or destroyed before the operation was complete.
  void wait();

  // Whether it has ended, with a result or an error. On a GPU: whether it is enqueued.
  bool completed() const;

  // Completes with a list of the tensors that the operation writes (of a send, that it reads). For
  // comm hooks, which return it. Everything else should wait by wait(): a failing peer does not end
  // the future's own wait(), which lasts for up to the group's timeout then.
  TensorFuture future() const;
  operator TensorFuture() const { return future(); }

  // A future of what `callback`, given future(), returns. The callback runs in a thread of the
  // library or of LibTorch, or at once where the operation is complete. It starts no collective,
  // and holds no reference to the group that could be the last one.
  TensorFuture then(std::function<c10::IValue(c10::ivalue::Future&)> callback,
                    c10::TypePtr type = c10::TensorType::get()) const;

  Work* operator->() { return this; }
  const Work* operator->() const { return this; }

 private:
  std::shared_ptr<State> state_;  // null: complete
};

}  // namespace ddp

#endif  // DDP_WORK_H_
