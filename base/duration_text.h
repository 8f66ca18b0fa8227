#ifndef DDP_BASE_DURATION_TEXT_H_
#define DDP_BASE_DURATION_TEXT_H_

#include <string>

#include "absl/time/time.h"

namespace ddp {

// Returns a rounded duration for messages: "3ms", "1.5s", "9m59s". Zero, and a positive duration
// below a millisecond, is "1ms". A negative duration is a minus and its absolute value.
std::string DurationText(absl::Duration duration);

}  // namespace ddp

#endif  // DDP_BASE_DURATION_TEXT_H_
