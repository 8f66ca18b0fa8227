#ifndef DDP_RPC_FIRST_MEETING_H_
#define DDP_RPC_FIRST_MEETING_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/common/membership.h"

namespace ddp::rpc::internal {

// Where the workers of one init() come together before they connect. Free of LibTorch.
struct FirstMeeting {
  int64_t world = 0;     // a number that only these workers share, greater than 0
  std::string mismatch;  // two workers have different sizes: both names and sizes; empty: none has
  std::string late;      // the workers that did not come in time; empty: all came
};

// Blocks until all workers have come, one has another size, or `timeout` has passed. A worker with
// another size than the first one ends the meeting for all that wait. No other user may have keys
// of `store`. Throws what the store throws.
FirstMeeting MeetFirst(std::shared_ptr<ddp::internal::GroupStore> store, const std::string& name,
                       const ddp::internal::Membership& membership, absl::Duration timeout);

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_FIRST_MEETING_H_
