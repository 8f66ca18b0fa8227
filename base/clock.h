// The passage of time, behind an interface, so that a decision can be tested without waiting.
#ifndef DDP_BASE_CLOCK_H_
#define DDP_BASE_CLOCK_H_

#include <cstdint>

#include "absl/time/time.h"
#include "base/language.h"

namespace ddp {

// Tells the time that has passed. `Now()` never goes back and does not follow the wall clock: on
// the real clock it is CLOCK_MONOTONIC, expressed as an absl::Time whose epoch means nothing. Two
// values of one clock may be subtracted and compared; a value must never be shown to a person.
//
// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  virtual absl::Time Now() const = 0;
};

// CLOCK_MONOTONIC.
class MonotonicClock final : public Clock {
 public:
  absl::Time Now() const override;
};

// CLOCK_MONOTONIC in nanoseconds: the stamp that processes of one host exchange.
int64_t MonotonicNanoseconds();

}  // namespace ddp

#endif  // DDP_BASE_CLOCK_H_
