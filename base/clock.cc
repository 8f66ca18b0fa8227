#include "base/clock.h"

#include <time.h>

namespace ddp {

int64_t MonotonicNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

absl::Time MonotonicClock::Now() const { return absl::FromUnixNanos(MonotonicNanoseconds()); }

}  // namespace ddp
