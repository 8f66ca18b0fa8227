#include "testing/accelerator/runtime/options.h"

#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::testing {
namespace {

// Reads whole numbers from variables.
class Reader {
 public:
  explicit Reader(const VariableGetter& variable) : variable_(variable) {}

  // Returns the number in the variable `name`, from 0 to `high`; nullopt: unset, or bad.
  std::optional<uint64_t> Number(const std::string& name,
                                 uint64_t high = std::numeric_limits<int64_t>::max()) {
    const std::string text = variable_(name).value_or("");
    if (text.empty()) return std::nullopt;
    uint64_t number = 0;
    if (absl::SimpleAtoi(text, &number) && number <= high) return number;
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(
          absl::StrCat(name, "='", text, "': it must be a whole number from 0 to ", high));
    }
    return std::nullopt;
  }

  std::optional<absl::Duration> Milliseconds(const std::string& name) {
    const std::optional<uint64_t> number = Number(name, 86400 * 1000);
    return number ? std::optional(absl::Milliseconds(*number)) : std::nullopt;
  }

  const absl::Status& status() const { return status_; }

 private:
  const VariableGetter& variable_;
  absl::Status status_;  // the first bad variable's
};

}  // namespace

absl::StatusOr<RuntimeOptions> RuntimeOptionsFromEnvironment(const VariableGetter& variable) {
  Reader reader(variable);
  RuntimeOptions options;
  const auto set = [](auto& field, const auto& value) {
    if (value) field = *value;
  };
  set(options.seed, reader.Number("DDP_SIM_SEED", std::numeric_limits<uint64_t>::max()));
  set(options.lateness, reader.Milliseconds("DDP_SIM_LATENESS_MS"));
  set(options.poison, reader.Number("DDP_SIM_POISON", 1));
  set(options.memory_limit, reader.Number("DDP_SIM_MEMORY_LIMIT"));
  set(options.launch_blocking, reader.Number("DDP_SIM_LAUNCH_BLOCKING", 1));
  set(options.fail_kernel, reader.Number("DDP_SIM_FAIL_KERNEL"));
  set(options.fail_collective, reader.Number("DDP_SIM_FAIL_COLLECTIVE"));
  set(options.hang_collective, reader.Number("DDP_SIM_HANG_COLLECTIVE"));
  set(options.watchdog, reader.Milliseconds("DDP_SIM_WATCHDOG_MS"));
  set(options.futures, reader.Number("DDP_SIM_FUTURES", 1));
  set(options.sync_budget, reader.Number("DDP_SIM_SYNC_BUDGET"));
  DDP_RETURN_IF_ERROR(reader.status());
  return options;
}

}  // namespace ddp::testing
