#ifndef DDP_COMM_BACKEND_BACKEND_TRAITS_H_
#define DDP_COMM_BACKEND_BACKEND_TRAITS_H_

#include <cstdint>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "ddp/common/reduce_op.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp::internal {

// The properties of a c10d backend that its interface does not tell. A BackendFactory gives them. A
// value.
struct BackendTraits {
  std::string name = {};  // "gloo", "nccl", or another one

  // The device on which a program's tensors must be. Nullopt: the backend decides.
  std::optional<at::Device> tensor_device = {};

  // Returns why the backend cannot combine tensors of `type` by `op`; "" when it can. May be null.
  std::string (*refusal)(ReduceOp op, at::ScalarType type) = nullptr;

  // Sets the tag of the backend's next operation. Null when the backend does not match operations
  // by tag.
  void (*set_tag)(c10d::Backend& backend, uint32_t tag) = nullptr;

  // False when messages between two ranks arrive in one order, whatever their tags.
  bool has_message_tags = true;

  // Returns true when operations on `device` run on its streams. Such an operation is complete for
  // the host as soon as the backend has enqueued it: a wait makes the current stream wait, and does
  // not block the host.
  bool RunsOnStream(at::Device device) const { return device.is_cuda(); }
};

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_BACKEND_TRAITS_H_
