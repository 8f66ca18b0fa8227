#ifndef DDP_COMM_BACKEND_EAGER_CONNECT_H_
#define DDP_COMM_BACKEND_EAGER_CONNECT_H_

#include <string>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp::internal {

// Binds `backend` to `device` and connects its ranks now. A backend that connects within its first
// collective, as LibTorch's NCCL does, would give that collective's timeout to a rank that never
// comes. Blocks until this rank is connected. Throws CommunicationError, which begins with `about`,
// when the backend fails or `timeout` has passed. After a timeout the connection goes on, on the
// thread "ddp-connect", which keeps the backend: it must not be used any more.
void ConnectEagerly(const c10::intrusive_ptr<c10d::Backend>& backend, at::Device device,
                    absl::Duration timeout, const std::string& about);

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_EAGER_CONNECT_H_
