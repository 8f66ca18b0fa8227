#ifndef DDP_BASE_DURATION_TEXT_H_
#define DDP_BASE_DURATION_TEXT_H_

#include <string>

#include "absl/time/time.h"

namespace ddp {

// A duration as a person wants to read it in a message, rounded: "3ms", "1.5s", "9m59s". Anything
// positive below a millisecond, and zero, is "1ms"; a negative one is its absolute value behind a
// minus.
std::string DurationText(absl::Duration duration);

}  // namespace ddp

#endif  // DDP_BASE_DURATION_TEXT_H_
