#ifndef DDP_COMM_ENGINE_BACKEND_ENGINE_BACKEND_H_
#define DDP_COMM_ENGINE_BACKEND_ENGINE_BACKEND_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/hierarchical/tree_partials.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace ddp::internal {

class HostGroup;

inline constexpr char kSharedMemoryName[] = "shm";
inline constexpr char kHierarchicalName[] = "hierarchical";

struct EngineBackendOptions {
  std::string name = kSharedMemoryName;  // as c10d shows it
  int rank = 0;
  std::vector<RankRange> hosts;                // see FindHosts() in host_meeting.h. At least one
  absl::Duration timeout = absl::Minutes(30);  // of one operation
  absl::Duration connect_timeout = absl::Minutes(30);  // for the last rank to come

  // The order in which sums of several hosts are taken; see HierarchicalEngine.
  bool deterministic = true;

  // True when the connections between the hosts go over the loopback address: for tests, whose
  // hosts are one.
  bool over_loopback = false;
};

// Makes a c10d backend for the ranks of one host or of several, which all call this at the same
// time with the same `store`. Blocks until all have come. Inside a host the ranks share memory: see
// CollectiveEngine, and HostGroup for what happens when a rank dies. Between hosts they use
// LibTorch's Gloo: see HierarchicalEngine.
//
// Operations. Those that a Communicator starts, on contiguous CPU tensors: all-reduce, broadcast,
// _allgather_base, _reduce_scatter_base, alltoall_base, barrier, send and recv. (On several hosts
// Gloo carries the messages, with tags below 2^30.) Copies take every type. Reductions take real
// numbers, bitwise ones integers. An all-reduce also sums sparse (COO) tensors.
//
// Works. On one host Work::wait() does the work on the waiting thread. A future completes without a
// wait as well; its continuations run on the engine's threads. abort() fails the operations of all
// ranks.
//
// Memory. allocateTensor() returns memory that all ranks of the host see; collectives use it
// without a copy.
//
// End. An operation that fails on several hosts ends the backend: so every rank's operations fail,
// on all hosts, also when a process dies.
//
// Errors: kDeadlineExceeded: a rank has not come. Others: the ranks of a host cannot share memory;
// the same on all ranks. Throws CommunicationError when Gloo cannot connect, and what the store
// throws.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeEngineBackend(
    const c10::intrusive_ptr<c10d::Store>& store, const EngineBackendOptions& options);

// Returns the keys that MakeEngineBackend() leaves in the store of a group of `size` ranks on one
// host, or on several.
std::vector<std::string> EngineBackendKeys(int size, bool one_host);

// Returns true when `backend` was made here.
bool IsEngineBackend(const c10d::Backend& backend);

// Returns the group of a backend that was made here for one host; null for any other backend. The
// backend's destructor leaves the group.
std::shared_ptr<HostGroup> OneHostGroupOf(c10d::Backend& backend);

// Starts an operation with a protocol of its own on a backend of OneHostGroupOf().
c10::intrusive_ptr<c10d::Work> StartOwn(c10d::Backend& backend,
                                        CollectiveEngine::OwnProtocol protocol);

// Sets the functions of `traits` for a backend that was made here.
void AddEngineTraits(BackendTraits& traits);

}  // namespace ddp::internal

#endif  // DDP_COMM_ENGINE_BACKEND_ENGINE_BACKEND_H_
