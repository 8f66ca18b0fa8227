#ifndef DDP_COMM_BACKEND_FACTORY_BACKEND_FACTORY_H_
#define DDP_COMM_BACKEND_FACTORY_BACKEND_FACTORY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/common/membership.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp::internal {

// The arguments by which a factory connects the ranks of one incarnation.
struct BackendSite {
  c10::intrusive_ptr<c10d::Store> store;  // of the group
  Membership membership;
  absl::Duration timeout;          // of one collective
  absl::Duration connect_timeout;  // of connecting
};

struct ConnectedBackend {
  c10::intrusive_ptr<c10d::Backend> backend;  // null in a group of one that needs none
  at::Device device{at::kCPU};                // on which this rank's tensors belong
  BackendTraits traits;
};

// Makes the c10d backends of a group: a new one each time the group is formed (an incarnation).
// Each kind of backend has its own factory. Thread-compatible.
class BackendFactory {
 public:
  virtual ~BackendFactory() = default;

  // Connects the ranks of `site.membership`, which all call this at the same time. Blocks until
  // they are connected. Throws CommunicationError when they cannot be connected in time, and
  // ConfigurationError when the program's settings are wrong.
  virtual ConnectedBackend Connect(const BackendSite& site) = 0;

  // Removes the keys that Connect() has left in `store`, in this incarnation and the earlier ones.
  // Call it when no rank can still be connecting. Throws what the store throws.
  virtual void RemoveKeys(const c10::intrusive_ptr<c10d::Store>& store,
                          const Membership& membership) {}
};

// Returns a factory of backends that the program makes. `make` gets a part of the group's store for
// this backend alone. Connect() throws ConfigurationError when `make` returns null, or a backend of
// another rank or size.
using OwnBackendMaker = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSite&)>;
std::shared_ptr<BackendFactory> MakeOwnFactory(OwnBackendMaker make);

// Returns the factory of "shm", "hierarchical", "gloo", "nccl" or "nccl-legacy". An empty name:
// nccl where this program has it and sees a GPU, else shm for ranks of one host, else hierarchical
// where a host has several ranks, else gloo, also where ranks cannot share memory. A group of one
// has a backend of NCCL alone. `deterministic`: see HierarchicalEngine. Throws ConfigurationError
// for another name.
std::shared_ptr<BackendFactory> MakeFactoryOf(const std::string& name, bool deterministic = true);

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_FACTORY_BACKEND_FACTORY_H_
