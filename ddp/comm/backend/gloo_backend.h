#ifndef DDP_COMM_BACKEND_GLOO_BACKEND_H_
#define DDP_COMM_BACKEND_GLOO_BACKEND_H_

#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp::internal {

struct GlooBackendOptions {
  int rank = 0;
  int size = 1;
  absl::Duration timeout = absl::Minutes(30);  // of one operation, and of connecting

  // True when all ranks run on this host: they then connect over the loopback address. Otherwise
  // they connect over the address of the host's own name. GLOO_SOCKET_IFNAME (one interface, or
  // several separated by commas, which share the traffic) overrides both.
  bool single_host = false;
};

// Makes LibTorch's own Gloo backend, connected to all ranks through `store`. Blocks until all ranks
// are connected. The process ignores SIGPIPE from then on, unless the program handles it. Rank 0 of
// the process's first group over several hosts logs UnsafeGlooWarning().
// Throws CommunicationError, which names the store's or Gloo's reason.
c10::intrusive_ptr<c10d::Backend> MakeGlooBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const GlooBackendOptions& options);

// Returns the keys that MakeGlooBackend() leaves in the store of a group of `size` ranks.
std::vector<std::string> GlooKeys(int size);

// The warning about Gloo over a network in LibTorch major.minor.patch; "" when none is needed. Up
// to LibTorch 2.14.0, Gloo takes the offset of a message from the peer without a check of its
// bounds (gloo issue 509): whoever reaches the port can write anywhere in the process.
std::string UnsafeGlooWarning(int major, int minor, int patch);

// Returns true when `backend` is LibTorch's Gloo, made here or by the program.
bool IsGloo(const c10d::Backend& backend);

// Sets the functions of `traits` for a backend that satisfies IsGloo().
void AddGlooTraits(BackendTraits& traits);

// BackendTraits::end_operations and launch_mutex of a backend that satisfies IsGloo().
void EndGlooOperations(c10d::Backend& backend);
Mutex* GlooLaunchMutex();

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_GLOO_BACKEND_H_
