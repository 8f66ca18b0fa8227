#include "ddp/comm/reports/log_entry.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {

std::string LogEntry::Serialize() const {
  if (kind == Kind::kFailure) return absl::StrCat("failure ", incarnation, " ", rank, " ", reason);
  if (kind == Kind::kWhere) return absl::StrCat("where ", incarnation, " ", number, " ", rank);
  return absl::StrCat("ping ", incarnation, " ", number, " ", absl::StrJoin(ranks, ","));
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
  if (words[0] == "where") {
    message.kind = Kind::kWhere;
    const bool numbers =
        absl::SimpleAtoi(words[2], &message.number) && absl::SimpleAtoi(words[3], &message.rank);
    return numbers ? std::optional<LogEntry>(message) : std::nullopt;
  }
  if (words[0] != "ping" || !absl::SimpleAtoi(words[2], &message.number)) return std::nullopt;
  message.kind = Kind::kPing;
  for (const auto& word : absl::StrSplit(words[3], ',', absl::SkipEmpty())) {
    int rank = -1;
    if (!absl::SimpleAtoi(word, &rank)) return std::nullopt;
    message.ranks.push_back(rank);
  }
  return message;
}

}  // namespace ddp::internal
