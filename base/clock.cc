#include "base/clock.h"

#include <poll.h>
#include <time.h>

namespace ddp {

int64_t MonotonicNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

absl::Time MonotonicClock::Now() const { return absl::FromUnixNanos(MonotonicNanoseconds()); }

void Pause(absl::Duration duration) {
  const timespec timeout = absl::ToTimespec(duration);
  (void)ppoll(nullptr, 0, &timeout, nullptr);
}

}  // namespace ddp
