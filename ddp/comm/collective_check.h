#ifndef DDP_COMM_COLLECTIVE_CHECK_H_
#define DDP_COMM_COLLECTIVE_CHECK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"
#include "ddp/comm/collective_fingerprint.h"
#include "ddp/comm/store_meeting.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddp::internal {

class FailureNotice;

// Compares each collective across the ranks before it starts (TORCH_DISTRIBUTED_DEBUG=DETAIL).
// Every rank writes a fingerprint of its collective into the store and reads those of all ranks.
// Each collective uses one StoreMeeting: a few round trips to the store per rank, and bytes in
// proportion to the number of ranks. The Communicator owns the check.
//
// Thread-compatible. All ranks must call Run() equally often.
class CollectiveCheck {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int64_t incarnation = 0;
    absl::Duration timeout;  // of the wait for the other ranks
  };

  CollectiveCheck(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<FailureNotice> notice,
                  const Options& options);

  struct Result {
    bool peer_failed = false;  // a failure report ended the comparison
    std::string error;         // empty when the ranks agree; a mismatch has one text on every rank
  };
  // Blocks until all ranks have called Run(), a failure report has come, or the timeout has passed.
  // After a timeout `error` names the ranks that are missing. Throws what the store throws.
  Result Run(const CollectiveFingerprint& mine);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<FailureNotice> notice_;
  const Options options_;
  int64_t sequence_ = 0;
  std::optional<StoreMeeting> previous_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_COLLECTIVE_CHECK_H_
