#ifndef DDP_LAUNCHER_PATIENCE_H_
#define DDP_LAUNCHER_PATIENCE_H_

#include <poll.h>

#include <algorithm>
#include <array>

#include "absl/time/time.h"
#include "base/clock.h"

namespace ddp::launcher {

// How long the end of a job waits for a side that takes its output.
struct Patience {
  absl::Duration stall_timeout;  // how long nothing may be taken
  // Readable when somebody wants the end now: from then on all has this much time. -1: nobody.
  int hurry_fd = -1;
  absl::Duration hurried_timeout;
};

// Waits by a Patience, again and again. Thread-compatible.
class PatientPoll {
 public:
  explicit PatientPoll(const Patience& patience) : patience_(patience) {}

  // Waits until `fd` has one of `events`, or somebody began to hurry. False: the patience is lost.
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
  absl::Time end_ = absl::InfiniteFuture();  // finite once somebody is in a hurry
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PATIENCE_H_
