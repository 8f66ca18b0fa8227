#ifndef DDP_COMM_CHECK_COLLECTIVE_CHECK_H_
#define DDP_COMM_CHECK_COLLECTIVE_CHECK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "ddp/comm/check/collective_record.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"

namespace ddp::internal {

// Compares each collective across the ranks before it starts (TORCH_DISTRIBUTED_DEBUG=DETAIL).
// Every rank writes a record of its collective into the store and reads those of all ranks.
// Each collective uses one StoreMeeting: a few round trips to the store per rank, and bytes in
// proportion to the number of ranks. The Communicator owns the check.
//
// Thread-compatible. All ranks must call Run() equally often.
class CollectiveCheck {
 public:
  // `timeout` limits the wait for the other ranks in one Run().
  CollectiveCheck(std::shared_ptr<GroupStore> store, std::shared_ptr<FailureMonitor> monitor,
                  const Membership& membership, absl::Duration timeout);

  struct Result {
    bool peer_failed = false;  // a failure report ended the comparison
    std::string error;         // empty when the ranks agree; a mismatch has one text on every rank
  };
  // Blocks until all ranks have called Run(), a failure report has come, or the timeout has passed.
  // After a timeout `error` names the ranks that are missing. Throws what the store throws.
  Result Run(const CollectiveRecord& mine);

 private:
  const std::shared_ptr<GroupStore> store_;
  const std::shared_ptr<FailureMonitor> monitor_;
  const Membership membership_;
  const absl::Duration timeout_;
  int64_t sequence_ = 0;
  std::optional<StoreMeeting> previous_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_COLLECTIVE_CHECK_H_
