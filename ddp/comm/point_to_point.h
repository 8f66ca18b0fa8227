#ifndef DDP_COMM_POINT_TO_POINT_H_
#define DDP_COMM_POINT_TO_POINT_H_

#include <cstdint>
#include <map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/comm/work_future.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp::internal {

// Messages between two ranks over a c10d backend.
//
// With Gloo each message is two: a header of a fixed size, with the type and the number of elements
// of the tensor, and the tensor's bytes. The tag of a message contains its number among those with
// the same peer and the same tag of the program; the second part's tag contains the type and the
// number of elements as well. So Gloo never receives more bytes than it expects, for which it would
// end the process, and a receiver with another type or size gets an error with both.
//
// With other backends a message is the tensor, under the program's tag.
//
// Thread-compatible. A future of Gloo has a thread of its own until it is complete: Gloo's messages
// have none.
class PointToPoint {
 public:
  // `matches_tags`: as Gloo does.
  PointToPoint(c10::intrusive_ptr<c10d::Backend> backend, bool matches_tags);

  // Starts one half of a message. `tensor` is contiguous and must not change until the future,
  // whose value is a list of `tensor`, is complete. Throws what the backend throws.
  WorkFuture Send(const at::Tensor& tensor, int peer, int tag);
  WorkFuture Receive(const at::Tensor& tensor, int peer, int tag);

 private:
  struct Tags {
    int header = 0;
    int body = 0;
  };
  static Tags TagsOf(const at::Tensor& tensor, int tag, int64_t number);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const bool matches_tags_;
  std::map<std::pair<int, int>, int64_t> sent_;  // by peer and tag
  std::map<std::pair<int, int>, int64_t> received_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_POINT_TO_POINT_H_
