#ifndef DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_
#define DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/peer_arena.h"
#include "ddp/comm/host_group/segment.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

// Brings the members of a HostGroup together: member 0 makes the segment, and every member gets
// the descriptors of the segment and of all members' arenas.
//
// Member 0 listens at an abstract unix socket with a random name and publishes name and token in
// the store. Each member connects and sends the token, its number and its arena's descriptor.
// Member 0 refuses a process of another user, and closes the connection of a stranger. A stranger
// that sends nothing holds up nobody. A member sends nothing to a process of another user that
// listens in the place of member 0. Abstract sockets belong to a network namespace, and the
// members must have one in common.
//
// All members succeed, or all fail; but a member may end just when the last word goes out. So the
// connections outlive Run(), in Result::links: see HostGroup.
class GroupEntry {
 public:
  struct Place {
    int member = 0;
    int size = 1;
    absl::Duration timeout = absl::Minutes(30);  // for the last member to come
  };
  // A connection with another member. The kernel closes it when that member's process ends.
  struct Link {
    int member = 0;
    UniqueFd socket;
  };
  struct Result {
    int member = 0;
    Segment segment;
    std::vector<std::shared_ptr<const PeerArena>> arenas;  // by member
    std::vector<Link> links = {};  // of member 0: with all others; of any other: with member 0
  };

  // Blocks until all members have come. Throws what the store throws. Errors: kDeadlineExceeded: a
  // member has not come; the message names it. Others: the members cannot share memory; the message
  // gives the reason.
  static absl::StatusOr<Result> Run(GroupStore& store, const Place& place);

  // The keys that Run() may leave in the store.
  static std::vector<std::string> Keys();
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_
