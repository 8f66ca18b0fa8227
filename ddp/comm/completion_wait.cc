#include "ddp/comm/completion_wait.h"

#include <ATen/core/ivalue.h>

#include "ddp/comm/news/wake_signal.h"

namespace ddp::internal {

CompletionWait::Result CompletionWait::Wait(c10::ivalue::Future& future,
                                            absl::Duration timeout) const {
  if (future.completed()) return Result::kCompleted;
  // The callback of a complete future runs at once on this thread, so no completion is missed. It
  // may run after the group has ended, so it shares the signal.
  future.addCallback([signal = monitor_->signal()](c10::ivalue::Future&) { signal->Notify(); });
  monitor_->signal()->Wait([&] { return future.completed() || monitor_->failed(); }, timeout);
  if (future.completed()) return Result::kCompleted;
  return monitor_->failed() ? Result::kPeerFailed : Result::kTimedOut;
}

bool CompletionWait::AwaitCompletion(c10::ivalue::Future& future, absl::Duration timeout) const {
  return monitor_->signal()->Wait([&] { return future.completed(); }, timeout);
}

void CompletionWait::YieldToCause(absl::Duration head_start) const {
  monitor_->signal()->Wait([] { return false; }, head_start);
}

}  // namespace ddp::internal
