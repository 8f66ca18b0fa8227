#ifndef DDP_COMM_DEBUG_LEVEL_H_
#define DDP_COMM_DEBUG_LEVEL_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::internal {

// Value of the environment variable TORCH_DISTRIBUTED_DEBUG, as in PyTorch: the amount of checks
// and log lines beyond errors.
//   OFF     the default: none
//   INFO    logs unused parameters, rebuilt buckets and the like
//   DETAIL  also compares every collective across the ranks, through the store, before it starts.
//           A difference is then an error that names the ranks, not a hang. Slow.
enum class DebugLevel { kOff, kInfo, kDetail };

// Parses a level; upper and lower case are equal, and an empty text is OFF. Errors:
// kInvalidArgument, which names the three levels.
absl::StatusOr<DebugLevel> ParseDebugLevel(absl::string_view text);

// Returns the variable's value, read once per process. Thread-safe. The constructor of a process
// group throws ConfigurationError for a bad value.
const absl::StatusOr<DebugLevel>& DebugLevelFromEnvironment();

// Returns DebugLevelFromEnvironment(), or OFF for a bad value. For code below a process group.
DebugLevel CurrentDebugLevel();

}  // namespace ddp::internal

#endif  // DDP_COMM_DEBUG_LEVEL_H_
