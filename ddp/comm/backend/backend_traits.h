#ifndef DDP_COMM_BACKEND_BACKEND_TRAITS_H_
#define DDP_COMM_BACKEND_BACKEND_TRAITS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/common/reduce_op.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp::internal {

// The properties of a c10d backend on which ddp/ depends. A BackendFactory sets them. A value.
struct BackendTraits {
  std::string name = {};  // "gloo", "nccl", or another one

  // The device on which a program's tensors must be. Nullopt: the backend decides.
  std::optional<at::Device> tensor_device = {};

  // Returns why the backend cannot combine tensors of `type` by `op`; "" when it can. Null: no
  // combination is refused before the backend is called.
  std::string (*refusal)(ReduceOp op, at::ScalarType type) = nullptr;

  // Sets the tag of the backend's next operation. Null when the backend does not match operations
  // by tag.
  void (*set_tag)(c10d::Backend& backend, uint32_t tag) = nullptr;

  // Ends the backend's operations in progress with errors, soon, on this rank and on its peers.
  // Blocks for a millisecond. To be called before the backend is destroyed, when nothing else is
  // called. Null when it cannot.
  void (*end_operations)(c10d::Backend& backend) = nullptr;

  // Advances the backend's operations on the calling thread until `stop()` or `deadline`. Returns
  // stop(). The completion of an operation, and the function that `waker` returns, make it call
  // `stop()`. That function may be called after the end of the backend. Null: other threads advance
  // the operations.
  bool (*drive)(c10d::Backend& backend, const std::function<bool()>& stop,
                absl::Time deadline) = nullptr;
  std::function<void()> (*waker)(c10d::Backend& backend) = nullptr;

  // Fails the backend's operations in progress, on all ranks. Returns false when a peer may still
  // write into the tensors of this rank. Null: operations cannot be aborted.
  bool (*abort)(c10d::Backend& backend) = nullptr;

  // Returns the rank whose process has ended, and with it the backend's operations; -1: none. Null:
  // the backend does not know.
  int (*dead_rank)(c10d::Backend& backend) = nullptr;
  // True when every rank of the group gets the same answer from dead_rank(), whoever asks first.
  bool all_see_dead_rank = false;

  // True when allocateTensor() returns memory that all ranks see, and that operations use without a
  // copy.
  bool allocates_shared = false;

  // Guards the start of a collective in all groups of the process. Null: none is needed.
  Mutex* launch_mutex = nullptr;

  // Where not null, a sparse all-reduce must be the only collective in progress on the backend: it
  // and the next collective start when all earlier ones are complete and this function returns
  // true. Returns true when the backend's threads have left every collective that is complete,
  // with its continuations. Does not block.
  bool (*settled)(c10d::Backend& backend) = nullptr;

  // False when messages between two ranks arrive in one order, whatever their tags.
  bool has_message_tags = true;

  // Returns true when operations on tensors of `device` run on streams of that device. The host may
  // continue as soon as the backend has enqueued such an operation: a wait makes the current stream
  // wait, and does not block the host.
  bool RunsOnStream(at::Device device) const { return !device.is_cpu(); }
};

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_BACKEND_TRAITS_H_
