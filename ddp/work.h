#ifndef DDP_WORK_H_
#define DDP_WORK_H_

#include <functional>
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "ddp/common/tensor_future.h"  // IWYU pragma: export

namespace ddp {

// A collective, or a message, that has started and completes without further calls.
//
//   ddp::Work sum = group->all_reduce_async(tensor);
//   ...                       // something else
//   sum.wait();               // from here on `tensor` holds the sum
//
// Until wait() returns or completed() is true, do not change the operation's tensors; the operation
// keeps them alive. After wait() has thrown, do not use those tensors: the operation may still
// write to them. A Work that nothing waits for completes all the same; its error is thrown by the
// group's next collective.
//
// Copies refer to one operation. `work->wait()` means `work.wait()`. A default-constructed Work has
// no operation and is complete. Thread-compatible: wait on the thread that uses the group. A Work
// may outlive its group.
class Work {
 public:
  struct State;  // private to the library

  Work() = default;
  explicit Work(std::shared_ptr<State> state);

  // Blocks until the result is there; on a GPU, makes the current stream wait for the result
  // instead, in each call. Throws PeerFailedError or CommunicationError, like the blocking form,
  // when a peer fails, is gone, or is in another collective, and after the group's timeout. A
  // wait() after one that threw throws the same. Throws CommunicationError when the group was
  // renewed or destroyed before the operation was complete; on a GPU, before this call.
  void wait();

  // Returns true when the operation has ended, with a result or an error; on a GPU, when the device
  // has ended it.
  bool completed() const;

  // Returns a future whose value is the list of tensors that the operation writes (for a send:
  // reads). For comm hooks, which return it. Other code should call wait(): the future's own wait()
  // does not end when a peer fails, and then lasts up to the group's timeout.
  TensorFuture future() const;
  operator TensorFuture() const { return future(); }

  // Returns a future of the value of `callback`, which gets future() as its argument. The callback
  // runs on a thread of the library or of LibTorch, or at once when the operation is complete. The
  // callback must not start a collective, and must not hold what may be the last reference to the
  // group.
  TensorFuture then(std::function<c10::IValue(c10::ivalue::Future&)> callback,
                    c10::TypePtr type = c10::TensorType::get()) const;

  Work* operator->() { return this; }
  const Work* operator->() const { return this; }

 private:
  std::shared_ptr<State> state_;  // null: complete
};

}  // namespace ddp

#endif  // DDP_WORK_H_
