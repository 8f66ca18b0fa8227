#include "base/duration_text.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ddp {

std::string DurationText(absl::Duration duration) {
  if (duration < absl::ZeroDuration()) return absl::StrCat("-", DurationText(-duration));
  if (duration == absl::InfiniteDuration()) return absl::FormatDuration(duration);
  absl::Duration unit = absl::Seconds(1);
  if (duration < absl::Seconds(10)) unit = absl::Milliseconds(100);
  if (duration < absl::Seconds(1)) unit = absl::Milliseconds(1);
  const absl::Duration rounded = absl::Trunc(duration + unit / 2, unit);
  return absl::FormatDuration(std::max(rounded, absl::Milliseconds(1)));
}

}  // namespace ddp
