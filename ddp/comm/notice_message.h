#ifndef DDP_COMM_NOTICE_MESSAGE_H_
#define DDP_COMM_NOTICE_MESSAGE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ddp::internal {

// What the ranks of a group tell each other outside the collectives (see FailureNotice): one entry
// of the group's log in the store. As text:
//   failure <incarnation> <rank> <reason>
//   ping <incarnation> <number> <rank>,<rank>,...
//   where <incarnation> <number> <rank>
struct NoticeMessage {
  enum class Kind { kFailure, kPing, kWhere };

  Kind kind = Kind::kFailure;
  int64_t incarnation = 0;

  int rank = -1;       // kFailure: who cannot go on, -1: no single rank; kWhere: who asks
  std::string reason;  // kFailure: why, in its own words

  int64_t number = 0;      // kPing, kWhere: names the answer
  std::vector<int> ranks;  // kPing: who shall answer

  std::string Serialize() const;

  // Nullopt: not such a text.
  static std::optional<NoticeMessage> Parse(absl::string_view text);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_NOTICE_MESSAGE_H_
