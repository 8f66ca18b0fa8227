#include "ddp/comm/debug_level.h"

#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::internal {

absl::StatusOr<DebugLevel> ParseDebugLevel(absl::string_view text) {
  if (text.empty() || absl::EqualsIgnoreCase(text, "OFF")) return DebugLevel::kOff;
  if (absl::EqualsIgnoreCase(text, "INFO")) return DebugLevel::kInfo;
  if (absl::EqualsIgnoreCase(text, "DETAIL")) return DebugLevel::kDetail;
  return absl::InvalidArgumentError(
      absl::StrCat("TORCH_DISTRIBUTED_DEBUG=\"", text, "\" is unknown; it is OFF, INFO or DETAIL"));
}

const absl::StatusOr<DebugLevel>& DebugLevelFromEnvironment() {
  static const auto* const level = [] {
    const char* text = std::getenv("TORCH_DISTRIBUTED_DEBUG");
    return new absl::StatusOr<DebugLevel>(ParseDebugLevel(text == nullptr ? "" : text));
  }();
  return *level;
}

DebugLevel CurrentDebugLevel() { return DebugLevelFromEnvironment().value_or(DebugLevel::kOff); }

}  // namespace ddp::internal
