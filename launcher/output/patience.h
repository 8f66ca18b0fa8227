#ifndef DDP_LAUNCHER_OUTPUT_PATIENCE_H_
#define DDP_LAUNCHER_OUTPUT_PATIENCE_H_

#include <poll.h>

#include <algorithm>
#include <array>

#include "absl/time/time.h"
#include "base/clock.h"

namespace ddp::launcher {

// Longest wait, at the end of a job, for a console that takes nothing. The second value applies
// once a signal has asked ddprun to end, or when the process that the user started is gone.
inline constexpr absl::Duration kConsoleStallTimeout = absl::Seconds(60);
inline constexpr absl::Duration kConsoleStallTimeoutAfterSignal = absl::Seconds(2);

// Limits of the wait, at the end of a job, for a reader of its output.
struct Patience {
  absl::Duration stall_timeout;  // longest time without progress
  // Descriptor that is readable when the user wants the end now; -1: none. From then on the whole
  // wait lasts at most `hurried_timeout`.
  int hurry_fd = -1;
  absl::Duration hurried_timeout;
};

// Polls within the limits of a Patience, call after call. Thread-compatible.
class PatientPoll {
 public:
  explicit PatientPoll(const Patience& patience) : patience_(patience) {}

  // Blocks until `fd` has one of `events` or `hurry_fd` becomes readable. Returns false when a
  // limit is exceeded.
  bool Wait(int fd, short events) {
    const absl::Time now = clock_.Now();
    if (now >= end_) return false;
    const absl::Duration wait =
        absl::Ceil(std::min(patience_.stall_timeout, end_ - now), absl::Milliseconds(1));
    const int hurry_fd = end_ == absl::InfiniteFuture() ? patience_.hurry_fd : -1;
    std::array<pollfd, 2> polled = {pollfd{.fd = fd, .events = events, .revents = 0},
                                    pollfd{.fd = hurry_fd, .events = POLLIN, .revents = 0}};
    const int ready =
        ::poll(polled.data(), polled.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)));
    if (polled[1].revents != 0) end_ = now + patience_.hurried_timeout;
    return ready != 0;
  }

 private:
  const Patience patience_;
  const MonotonicClock clock_;
  absl::Time end_ = absl::InfiniteFuture();  // finite once `hurry_fd` was readable
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_PATIENCE_H_
