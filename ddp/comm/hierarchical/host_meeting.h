// How the ranks of a group find their hosts. Free of LibTorch.
#ifndef DDP_COMM_HIERARCHICAL_HOST_MEETING_H_
#define DDP_COMM_HIERARCHICAL_HOST_MEETING_H_

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/tree_partials.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

// Returns a text that is equal for two processes when they can share memory and reach each other
// over the loopback address: the boot of the kernel, the network namespace, the PID namespace and
// the host's name. Containers of one machine with a namespace of their own are hosts of their own.
std::string HostIdentity();

// Returns the `identity` of each rank, by rank: a text that tells its host. All ranks call this at
// the same time with the same `store`. Blocks until all have called.
// - kDeadlineExceeded: a rank has not called within `timeout`.
// - Throws what the store throws.
absl::StatusOr<std::vector<std::string>> ExchangeHosts(GroupStore& store, int rank, int size,
                                                       const std::string& identity,
                                                       absl::Duration timeout);

// The place of a rank among those of its host.
struct HostPlace {
  int local_rank = 0;
  RankRange local = {};  // the ranks of the host; empty when they do not follow each other
};
HostPlace HostPlaceOf(std::span<const std::string> identities, int rank);

// Finds out which ranks stand on which host. All ranks call this at the same time with the same
// `store`, and get the same result. `local` are the ranks of this host; empty when unknown.
// - Blocks until all ranks have called.
// - kDeadlineExceeded: a rank has not called within `timeout`.
// - kFailedPrecondition: some rank does not know, or the ranks contradict each other.
// - Throws what the store throws.
absl::StatusOr<std::vector<RankRange>> FindHosts(GroupStore& store, int rank, int size,
                                                 RankRange local, absl::Duration timeout);

// Returns the keys that these functions leave in the store of a group of `size` ranks.
std::vector<std::string> HostsKeys(int size);

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HOST_MEETING_H_
