#ifndef DDP_COMM_HIERARCHICAL_HIERARCHICAL_BACKEND_H_
#define DDP_COMM_HIERARCHICAL_HIERARCHICAL_BACKEND_H_

#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/hierarchical/tree_partials.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp::internal {

struct HierarchicalOptions {
  int rank = 0;
  std::vector<RankRange> hosts;                // see FindHosts() in host_meeting.h. At least one
  absl::Duration timeout = absl::Minutes(30);  // of one operation
  absl::Duration connect_timeout = absl::Minutes(30);  // for the last rank to come

  // The order in which sums are taken; see HierarchicalEngine.
  bool deterministic = true;

  // True when the connections between the hosts go over the loopback address: for tests, whose
  // hosts are one.
  bool over_loopback = false;
};

inline constexpr char kHierarchicalName[] = "hierarchical";

// Makes a c10d backend for ranks on several hosts, which all call this at the same time with the
// same `store`. Blocks until all are connected. Inside a host the ranks share memory. Between hosts
// they use LibTorch's Gloo: see HierarchicalEngine.
//
// Operations. All of c10d's collectives and messages, on CPU tensors of every type. Strides are
// free in collectives; a tensor that is not contiguous costs a copy. Reductions, reduce-scatters,
// all-gathers, broadcasts and barriers use both levels. Other collectives and messages go through
// one Gloo over all ranks.
//
// Works. Every operation is asynchronous and has a future. One thread carries out the
// collectives, in order (see CollectiveQueue). Continuations of futures run on it.
//
// End. An operation that fails ends the backend: this rank ends the group in shared memory and
// closes its connections. So every rank's operations fail, on all hosts: also when a process dies,
// which its peers on the same host notice within microseconds.
//
// Errors: kDeadlineExceeded: a rank has not come. Others: the ranks of a host cannot share memory;
// the same on all ranks. Throws CommunicationError when Gloo cannot connect, and what the store
// throws.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeHierarchicalBackend(
    const c10::intrusive_ptr<c10d::Store>& store, const HierarchicalOptions& options);

// Returns the keys that FindHosts() and MakeHierarchicalBackend() leave in the store of a group of
// `size` ranks.
std::vector<std::string> HierarchicalKeys(int size);

// Returns true when `backend` was made here.
bool IsHierarchical(const c10d::Backend& backend);

// Sets the functions of `traits` for a backend that was made here.
void AddHierarchicalTraits(BackendTraits& traits);

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HIERARCHICAL_BACKEND_H_
