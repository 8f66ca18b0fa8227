#ifndef DDP_COMM_REPORTS_LOG_ENTRY_H_
#define DDP_COMM_REPORTS_LOG_ENTRY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {

// An entry of a group's log in the store. The ranks of the group communicate through this log
// outside the collectives (see ReportLog). A value. Its text is one of:
//   failure <incarnation> <rank> <reason>  reports a failure
//   where <incarnation> <number> <rank>    asks all ranks where they are
struct LogEntry {
  enum class Kind { kFailure, kWhere };

  Kind kind = Kind::kFailure;
  int64_t incarnation = 0;

  int rank = -1;       // kFailure: the rank at fault, -1 for no single one; kWhere: the asker
  std::string reason;  // kFailure: the cause, for a person

  int64_t number = 0;  // kWhere: of the question

  static LogEntry Of(int64_t incarnation, const GroupFailure& failure) {
    return {.incarnation = incarnation, .rank = failure.rank, .reason = failure.reason};
  }
  std::string Serialize() const;

  // Returns nullopt when `text` is not the result of Serialize().
  static std::optional<LogEntry> Parse(absl::string_view text);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_LOG_ENTRY_H_
