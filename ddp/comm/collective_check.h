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

// TORCH_DISTRIBUTED_DEBUG=DETAIL: before a collective all ranks show each other, through the store,
// what they are about to run. One meeting per collective, so it costs a few round trips to the
// store and bytes in proportion to the number of ranks.
//
// Thread-compatible; all ranks call Run() as often.
class CollectiveCheck {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int64_t incarnation = 0;
    absl::Duration timeout;  // how long a rank is waited for
  };

  CollectiveCheck(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<FailureNotice> notice,
                  const Options& options);

  struct Result {
    bool peer_failed = false;  // the news of a failure ended the comparison
    std::string error;         // what is wrong, the same text on every rank; empty: nothing
  };
  // Throws what the store throws.
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
