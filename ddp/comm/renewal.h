#ifndef DDP_COMM_RENEWAL_H_
#define DDP_COMM_RENEWAL_H_

#include <cstdint>
#include <optional>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"
#include "ddp/comm/failure_notice.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddp::internal {

struct RenewalOptions {
  int rank = 0;
  int size = 1;
  int64_t incarnation = 0;  // the next one, which the ranks will build
  absl::Duration timeout;   // of the wait for ranks that are alive
};

// Renews a group after a failure: waits in the store until all ranks have called this function.
// Returns nullopt when all have come. Otherwise returns a rank that will not come: its process is
// gone, it has left the group, or the timeout has passed. Every rank gets the same answer, also
// a rank that calls later.
//
// The ranks ask a rank that is missing after 200 ms whether it is alive, and again every 3 s. The
// thread of its FailureNotice answers, even while its trainer is busy. Without an answer within
// 3 s, its process counts as gone.
//
// Blocks the calling thread. Throws what the store throws; the call may then be repeated.
std::optional<FailureNotice::Failure> MeetForRenewal(const c10::intrusive_ptr<c10d::Store>& store,
                                                     FailureNotice& notice,
                                                     const RenewalOptions& options);

}  // namespace ddp::internal

#endif  // DDP_COMM_RENEWAL_H_
