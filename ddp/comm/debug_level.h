#ifndef DDP_COMM_DEBUG_LEVEL_H_
#define DDP_COMM_DEBUG_LEVEL_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::internal {

// How much the library checks and says beyond errors: the environment variable
// TORCH_DISTRIBUTED_DEBUG, as in PyTorch.
//   OFF     the default: nothing
//   INFO    unused parameters, rebuilt buckets and the like go to the log
//   DETAIL  and before every collective the ranks compare through the store what each of them is
//           about to run: a difference is an error that names the ranks instead of a hang. Slow.
enum class DebugLevel { kOff, kInfo, kDetail };

// Upper and lower case are one; empty is OFF. kInvalidArgument names the three.
absl::StatusOr<DebugLevel> ParseDebugLevel(absl::string_view text);

// The variable's value, read once in the life of the process. Thread-safe. A process group cannot
// be made with a bad value (ConfigurationError).
const absl::StatusOr<DebugLevel>& DebugLevelFromEnvironment();

// The same for those who run below a process group: a bad value counts as OFF.
DebugLevel CurrentDebugLevel();

}  // namespace ddp::internal

#endif  // DDP_COMM_DEBUG_LEVEL_H_
