#include "ddp/comm/reports/log_entry.h"

#include "absl/strings/str_cat.h"
#include "base/text_fields.h"

namespace ddp::internal {

std::string LogEntry::Serialize() const {
  if (kind == Kind::kFailure) return absl::StrCat("failure ", incarnation, " ", rank, " ", reason);
  return absl::StrCat("where ", incarnation, " ", number, " ", rank);
}

std::optional<LogEntry> LogEntry::Parse(absl::string_view text) {
  LogEntry entry;
  std::string kind;
  if (ReadFields(text, ' ', kind, entry.incarnation, entry.rank, entry.reason) &&
      kind == "failure") {
    return entry;
  }
  entry = {.kind = Kind::kWhere};
  const bool is_where = ReadFields(text, ' ', kind, entry.incarnation, entry.number, entry.rank);
  return is_where && kind == "where" ? std::optional<LogEntry>(entry) : std::nullopt;
}

}  // namespace ddp::internal
