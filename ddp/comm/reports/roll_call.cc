#include "ddp/comm/reports/roll_call.h"

#include "base/clock.h"
#include "base/text_fields.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/common/membership.h"

namespace ddp::internal {

bool RollCall::Ask(int64_t since_ns) {
  question_ = log_.AskWhere(since_ns);
  asked_ns_ = MonotonicNanoseconds();
  answers_.clear();
  silent_.clear();
  return question_.has_value();
}

absl::Duration RollCall::age() const {
  return absl::Nanoseconds(MonotonicNanoseconds() - asked_ns_);
}

bool RollCall::ReadAnswers() {
  if (!question_.has_value()) return false;
  const Membership self = log_.membership();
  std::vector<std::string> keys;
  for (int rank = 0; rank < self.size; ++rank) keys.push_back(ReportLog::AnswerKey(rank));
  const std::vector<std::optional<std::string>> found = log_.store().GetPresent(keys);
  answers_.clear();
  silent_.clear();
  for (int rank = 0; rank < self.size; ++rank) {
    if (rank == self.rank) continue;  // its own thread may not have answered yet
    int64_t number = 0;
    std::string answer;
    // An answer to a later question is one to this question.
    if (ReadFields(found[rank].value_or(""), ' ', number, answer) && number >= *question_) {
      answers_[rank] = answer;
    } else {
      silent_.push_back(rank);
    }
  }
  return silent_.empty();
}

}  // namespace ddp::internal
