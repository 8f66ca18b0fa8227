#ifndef DDP_COMM_MESSAGE_THREAD_H_
#define DDP_COMM_MESSAGE_THREAD_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "base/mutex.h"
#include "ddp/comm/work_future.h"

namespace c10d {
class Work;
}  // namespace c10d

namespace ddp::internal {

// Completes the futures of messages whose Works have none, as Gloo's. Such a Work completes only in
// its wait(), and no call waits for several. One thread ("ddp-messages") therefore waits for one
// message at a time, and Hurry() makes it turn to another: abort() ends a wait of Gloo's and leaves
// the message as it is.
//
// The thread starts with the first message. It is detached, and ends when the owner is gone and
// every message has ended. Thread-safe. Owned by a std::shared_ptr.
class MessageThread : public std::enable_shared_from_this<MessageThread> {
 public:
  // A part of a message. `check` runs after it has arrived; when it throws, the message ends.
  struct Part {
    c10::intrusive_ptr<c10d::Work> work;
    std::function<void()> check = {};
  };

  // Returns the future of a message of these parts, with the value {tensor}.
  WorkFuture Add(std::list<Part> parts, const at::Tensor& tensor);

  // Tells that a caller waits for `future`: the thread turns to that message. When it is no future
  // of a message here, such as one derived from it, every message gets its turn. Returns true when
  // the caller should call again within some milliseconds.
  bool Hurry(const WorkFuture& future);

 private:
  struct Message {
    std::list<Part> parts;  // not arrived yet
    at::Tensor tensor;
    WorkFuture future;
  };

  void Run();
  bool Await(Message& message);

  Mutex mutex_;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<std::shared_ptr<Message>> messages_ ABSL_GUARDED_BY(mutex_);  // the first one's turn
  // The thread waits for it, and abort() has not been called in this wait.
  c10::intrusive_ptr<c10d::Work> awaited_ ABSL_GUARDED_BY(mutex_);
  int64_t turn_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // when that wait began
  bool turned_ ABSL_GUARDED_BY(mutex_) = false;  // Hurry() has ended the thread's wait
};

}  // namespace ddp::internal

#endif  // DDP_COMM_MESSAGE_THREAD_H_
