// Elapsed time behind an interface, so that decisions can be tested without waiting.
#ifndef DDP_BASE_CLOCK_H_
#define DDP_BASE_CLOCK_H_

#include <cstdint>

#include "absl/time/time.h"
#include "base/language.h"

namespace ddp {

// A monotonic clock. `Now()` never goes back and does not follow the wall clock. The real clock is
// CLOCK_MONOTONIC as an absl::Time with an arbitrary epoch. Callers may subtract and compare two
// values of one clock; they must never show a value to a person.
//
// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  virtual absl::Time Now() const = 0;
};

// The real clock: CLOCK_MONOTONIC.
class MonotonicClock final : public Clock {
 public:
  absl::Time Now() const override;
};

// Returns CLOCK_MONOTONIC in nanoseconds. Values of all processes of one host are comparable.
int64_t MonotonicNanoseconds();

// Blocks for `duration`, or until a signal: the pause before what failed is tried again. Where
// there is an event to wait for, wait for that. Thread: any.
void Pause(absl::Duration duration);

}  // namespace ddp

#endif  // DDP_BASE_CLOCK_H_
