#ifndef DDP_COMM_COMPLETION_WAIT_H_
#define DDP_COMM_COMPLETION_WAIT_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/reports/failure_monitor.h"

namespace c10d {
class Backend;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp::internal {

// Waits for futures on behalf of a Communicator. A wait ends with the future, a failure report or
// the timeout. Thread-compatible.
class CompletionWait {
 public:
  enum class Result { kCompleted, kPeerFailed, kTimedOut };

  // `backend` outlives the object. It may be null.
  CompletionWait(std::shared_ptr<FailureMonitor> monitor, c10d::Backend* backend,
                 const BackendTraits& traits)
      : monitor_(std::move(monitor)),
        backend_(backend),
        drive_(backend != nullptr ? traits.drive : nullptr),
        wake_(drive_ != nullptr ? traits.waker(*backend) : nullptr) {}

  // Blocks until `future` is complete (with a value or an error), a failure is known, or `timeout`
  // has passed; checked in this order. The backend thread that completes the future wakes this
  // call. With a driver, this call carries out the backend's operations meanwhile.
  Result Wait(c10::ivalue::Future& future, absl::Duration timeout) const;

  // Blocks until `future` is complete or `timeout` has passed; a failure does not end the wait.
  // Returns true when the future is complete. Call Wait() with the same future before: only its
  // callback wakes this call.
  bool AwaitCompletion(c10::ivalue::Future& future, absl::Duration timeout) const;

  // Blocks for `head_start`. A rank that ends because of a peer lets that peer end first, so the
  // launcher sees the cause before its consequences.
  void YieldToCause(absl::Duration head_start) const;

 private:
  Result Drive(c10::ivalue::Future& future, absl::Duration timeout) const;

  const std::shared_ptr<FailureMonitor> monitor_;
  c10d::Backend* const backend_;
  decltype(BackendTraits::drive) const drive_;  // null when other threads complete the futures
  const std::function<void()> wake_;            // may be called after the communicator has ended
};

}  // namespace ddp::internal

#endif  // DDP_COMM_COMPLETION_WAIT_H_
