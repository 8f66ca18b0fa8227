#ifndef DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_
#define DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

// Brings the members of a HostGroup together: every member maps the segment, which member 0 makes,
// and the arenas of all members.
//
// The ranks of all hosts meet twice in the store. At the first meeting each says where its memory
// is (see ProcessFile). Then each takes its place in the segment of its host, and maps the memory.
// At the second one each says that it has done so. A rank that cannot ends the meeting with its
// reason. So all ranks of all hosts succeed, or all fail with the same reason. A process of another
// user, or of another PID namespace, can map nothing.
class GroupEntry {
 public:
  struct Place {
    int member = 0;                              // among the ranks of this host
    int size = 1;                                // of this host: how many ranks it has
    int first_rank = 0;                          // of this host
    int ranks = 0;                               // of all hosts; 0: there is one host
    absl::Duration timeout = absl::Minutes(30);  // for the last rank to come
  };

  // Blocks until all ranks have come. Throws what the store throws. Errors: kDeadlineExceeded: a
  // rank has not come; the message names it. kUnavailable: the ranks of some host cannot share
  // memory; the message gives the reason.
  static absl::StatusOr<std::shared_ptr<HostGroup>> Run(GroupStore& store, const Place& place);

  // The keys that Run() may leave in the store of `ranks` ranks.
  static std::vector<std::string> Keys(int ranks);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_
