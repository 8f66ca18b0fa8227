#ifndef DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_
#define DDP_COMM_HOST_GROUP_GROUP_ENTRY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/arena/peer_arena.h"
#include "ddp/comm/host_group/member_thread.h"
#include "ddp/comm/host_group/segment.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

// Brings the members of a HostGroup together: every member maps the segment, which member 0 makes,
// and the arenas of all members.
//
// Member 0 says in the store where its segment is (see ProcessFile). Everything else goes through
// the segment: each member takes its place there, says where its arena is, waits until all have
// come, maps their arenas, and waits until all have done so. So a member that dies is noticed as in
// a group that has come together: by the kernel, at once. A process of another user, or of another
// PID namespace, can map nothing.
//
// All members succeed, or all fail: one word in the segment has the verdict, and the first stays.
class GroupEntry {
 public:
  struct Place {
    int member = 0;
    int size = 1;
    absl::Duration timeout = absl::Minutes(30);  // for the last member to come
  };
  struct Result {
    int member = 0;
    std::shared_ptr<const Segment> segment;
    std::vector<std::shared_ptr<const PeerArena>> arenas;  // by member
    std::unique_ptr<MemberThread> thread;                  // holds this member's place
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
