#include "ddp/comm/completion_wait.h"

#include <algorithm>

#include <ATen/core/ivalue.h>

#include "base/clock.h"
#include "ddp/comm/reports/wake_signal.h"

namespace ddp::internal {
namespace {

// How long a wait drives the backend before it asks to be woken by the future: a future of the
// backend itself needs no such call, and most complete within this time.
constexpr absl::Duration kQuickDrive = absl::Microseconds(500);

}  // namespace

CompletionWait::Result CompletionWait::Drive(c10::ivalue::Future& future,
                                             absl::Duration timeout) const {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  const auto stop = [&] { return future.completed() || monitor_->failed(); };
  if (!drive_(*backend_, stop, std::min(deadline, clock.Now() + kQuickDrive))) {
    future.addCallback([wake = wake_](c10::ivalue::Future&) { wake(); });
    drive_(*backend_, stop, deadline);
  }
  if (future.completed()) return Result::kCompleted;
  return monitor_->failed() ? Result::kPeerFailed : Result::kTimedOut;
}

CompletionWait::Result CompletionWait::Wait(c10::ivalue::Future& future,
                                            absl::Duration timeout) const {
  if (future.completed()) return Result::kCompleted;
  if (drive_ != nullptr) return Drive(future, timeout);
  // The callback of a complete future runs at once on this thread, so no completion is missed. It
  // may run after the group has ended, so it shares the signal.
  future.addCallback([signal = monitor_->signal()](c10::ivalue::Future&) { signal->Notify(); });
  monitor_->signal()->Wait([&] { return future.completed() || monitor_->failed(); }, timeout);
  if (future.completed()) return Result::kCompleted;
  return monitor_->failed() ? Result::kPeerFailed : Result::kTimedOut;
}

bool CompletionWait::AwaitCompletion(c10::ivalue::Future& future, absl::Duration timeout) const {
  const auto completed = [&] { return future.completed(); };
  return drive_ != nullptr ? drive_(*backend_, completed, MonotonicClock().Now() + timeout)
                           : monitor_->signal()->Wait(completed, timeout);
}

void CompletionWait::YieldToCause(absl::Duration head_start) const {
  monitor_->signal()->Wait([] { return false; }, head_start);
}

}  // namespace ddp::internal
