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
  int64_t incarnation = 0;  // that the ranks are about to build
  absl::Duration timeout;   // how long a rank that is alive is waited for
};

// Brings the ranks of a group together again after a failure. Blocks until all are here (nullopt),
// or one will never come: it died, left, or let the timeout pass. Every rank gets the same answer,
// also one that comes later, and that answer stays.
//
// A rank that is not here after 200 ms is asked whether it is alive, and again every 3 s. Its
// FailureNotice answers, whatever the rank itself is busy with; no answer within 3 s means that its
// process is gone.
//
// Throws what the store throws.
std::optional<FailureNotice::Failure> MeetForRenewal(const c10::intrusive_ptr<c10d::Store>& store,
                                                     FailureNotice& notice,
                                                     const RenewalOptions& options);

}  // namespace ddp::internal

#endif  // DDP_COMM_RENEWAL_H_
