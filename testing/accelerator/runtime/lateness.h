#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_LATENESS_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_LATENESS_H_

#include <cstdint>

#include "absl/time/time.h"
#include "testing/accelerator/runtime/stream_place.h"
#include "testing/simulator/random.h"

namespace ddp::testing {

// Returns how long task `number` of the stream at `place` waits before it runs: nothing for half of
// the tasks, else a time up to `longest`. Equal arguments give equal times.
inline absl::Duration Lateness(uint64_t seed, StreamPlace place, int64_t number,
                               absl::Duration longest) {
  uint64_t state = seed;
  for (const int64_t part : {int64_t{place.device}, place.stream, number}) {
    state = Random(state ^ static_cast<uint64_t>(part)).Next();
  }
  Random random(state);
  if (random.Chance(0.5)) return absl::ZeroDuration();
  return longest * random.Fraction();
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_LATENESS_H_
