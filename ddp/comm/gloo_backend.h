#ifndef DDP_COMM_GLOO_BACKEND_H_
#define DDP_COMM_GLOO_BACKEND_H_

#include <cstdint>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp::internal {

struct GlooBackendOptions {
  int rank = 0;
  int size = 1;
  absl::Duration timeout = absl::Minutes(30);  // of one operation and of the connecting

  // Whether all ranks run on this host: then they talk over the loopback address. Otherwise over
  // the address of the host's own name. GLOO_SOCKET_IFNAME (one interface, or several with commas
  // between them, which then share the traffic) decides in either case.
  bool single_host = false;
};

// LibTorch's own Gloo backend, connected to all ranks through `store`. Blocks until they came.
// From then on the process ignores SIGPIPE, unless the program handles it.
// Throws CommunicationError, naming the store's or Gloo's reason.
c10::intrusive_ptr<c10d::Backend> MakeGlooBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const GlooBackendOptions& options);

// Whether the backend is LibTorch's Gloo, whoever has made it.
bool IsGloo(const c10d::Backend& backend);

// Sets the tag by which the next operation of `backend`, which IsGloo(), matches the messages
// of the other ranks, in place of a running number. Gloo ends the process when an operation
// receives more bytes than it expects; operations with different tags receive nothing from each
// other.
void SetNextGlooTag(c10d::Backend& backend, uint32_t tag);

}  // namespace ddp::internal

#endif  // DDP_COMM_GLOO_BACKEND_H_
