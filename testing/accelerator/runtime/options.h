#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_OPTIONS_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/environment.h"

namespace ddp::testing {

// How the simulated devices behave. The variable of each field stands beside it.
struct RuntimeOptions {
  uint64_t seed = 0;                               // DDP_SIM_SEED
  absl::Duration lateness = absl::ZeroDuration();  // DDP_SIM_LATENESS_MS: the longest of a task
  bool poison = true;                              // DDP_SIM_POISON: freed memory becomes NaN
  size_t memory_limit = size_t{4} << 30;           // DDP_SIM_MEMORY_LIMIT: bytes of a device
  bool launch_blocking = false;                    // DDP_SIM_LAUNCH_BLOCKING
  int64_t fail_kernel = 0;                         // DDP_SIM_FAIL_KERNEL: from 1; 0: none fails
  int64_t fail_collective = 0;                     // DDP_SIM_FAIL_COLLECTIVE: likewise
  int64_t hang_collective = 0;                     // DDP_SIM_HANG_COLLECTIVE: likewise
  absl::Duration watchdog = absl::ZeroDuration();  // DDP_SIM_WATCHDOG_MS: a collective that lasts
                                                   // longer ends the process; 0: no watchdog
  bool futures = true;                             // DDP_SIM_FUTURES: works have futures
  std::optional<int64_t> sync_budget;              // DDP_SIM_SYNC_BUDGET: the synchronizations
                                                   // by the host that a step may make
  // Called with a collective's number when it begins, on its stream's thread.
  std::function<void(int64_t number)> on_collective;
};

// Reads the variables. A variable that is unset or empty leaves the default. Returns
// kInvalidArgument, with the variable and its value, when a value is bad.
absl::StatusOr<RuntimeOptions> RuntimeOptionsFromEnvironment(
    const VariableGetter& variable = EnvironmentVariable);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_OPTIONS_H_
