#include "ddp/comm/reports/log_entry.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {

std::string LogEntry::Serialize() const {
  if (kind == Kind::kFailure) return absl::StrCat("failure ", incarnation, " ", rank, " ", reason);
  return absl::StrCat("where ", incarnation, " ", number, " ", rank);
}

std::optional<LogEntry> LogEntry::Parse(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, absl::MaxSplits(' ', 3));
  LogEntry message;
  if (words.size() != 4 || !absl::SimpleAtoi(words[1], &message.incarnation)) return std::nullopt;
  if (words[0] == "failure") {
    if (!absl::SimpleAtoi(words[2], &message.rank)) return std::nullopt;
    message.reason = words[3];
    return message;
  }
  message.kind = Kind::kWhere;
  if (words[0] != "where" || !absl::SimpleAtoi(words[2], &message.number) ||
      !absl::SimpleAtoi(words[3], &message.rank)) {
    return std::nullopt;
  }
  return message;
}

}  // namespace ddp::internal
