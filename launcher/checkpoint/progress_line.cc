#include "launcher/checkpoint/progress_line.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/inspect/report.h"

namespace ddp::launcher {

ProgressLine::ProgressLine(std::string title, absl::Time now)
    : title_(std::move(title)), begin_(now), shown_(now) {}

std::optional<std::string> ProgressLine::Update(uint64_t done, uint64_t total, absl::Time now) {
  if (now - shown_ < kInterval) return std::nullopt;
  shown_ = now;
  const double rate = static_cast<double>(done) / absl::ToDoubleSeconds(now - begin_);
  const double part = total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total);
  return absl::StrCat(title_, ": ", elastic::BytesText(done), " of ", elastic::BytesText(total),
                      " (", static_cast<int>(100 * part), "%), ",
                      elastic::BytesText(static_cast<uint64_t>(rate)), "/s");
}

}  // namespace ddp::launcher
