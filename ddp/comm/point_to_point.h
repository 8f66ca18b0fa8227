#ifndef DDP_COMM_POINT_TO_POINT_H_
#define DDP_COMM_POINT_TO_POINT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/comm/work_future.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace ddp::internal {

class MessageThread;

// Sends messages to other ranks and receives theirs, over a c10d backend. The Communicator owns it.
//
// With Gloo each message has two parts: a header with the type and the number of elements of the
// tensor, and the tensor's bytes, if any. The tag of the header is a hash of the program's tag and
// the message's number among those with the same peer and tag. The tag of the bytes is a hash of
// these, the type and the number of elements. So, unless two hashes of 30 bits collide, Gloo does
// not receive more bytes than it expects; it would end the process for that. A receiver that
// expects another type or size than the sender gets an error that names both.
//
// With other backends a message is the tensor, under the program's tag. A tensor without elements
// is not sent.
//
// Thread-compatible. With Gloo, also between hosts, one MessageThread completes the futures.
class PointToPoint {
 public:
  // `matches_tags`: the backend matches messages by tag, so a message has two parts, as with Gloo.
  PointToPoint(c10::intrusive_ptr<c10d::Backend> backend, bool matches_tags);

  struct Message {
    WorkFuture future;
    c10::intrusive_ptr<c10d::Work> work;  // null: the message has two parts, or none
  };

  // Start one half of a message and do not wait. `tensor` is contiguous and must not change until
  // the future is complete. The future's value is a list of `tensor`, or the backend's own value.
  // Throws what the backend throws; the future has the error of a message that fails later.
  Message Send(const at::Tensor& tensor, int peer, int tag);
  Message Receive(const at::Tensor& tensor, int peer, int tag);

  // See MessageThread::Hurry().
  const std::shared_ptr<MessageThread>& thread() const { return thread_; }

 private:
  struct Tags {
    int header = 0;
    int body = 0;
  };
  static Message WithoutHeader(const c10::intrusive_ptr<c10d::Work>& work,
                               const at::Tensor& tensor);
  WorkFuture FutureOfBoth(const c10::intrusive_ptr<c10d::Work>& first,
                          const c10::intrusive_ptr<c10d::Work>& second, std::function<void()> check,
                          const at::Tensor& tensor);
  static Tags TagsOf(const at::Tensor& tensor, int tag, int64_t number);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const bool matches_tags_;
  const std::shared_ptr<MessageThread> thread_;
  std::map<std::pair<int, int>, int64_t> sent_;  // by peer and tag
  std::map<std::pair<int, int>, int64_t> received_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_POINT_TO_POINT_H_
