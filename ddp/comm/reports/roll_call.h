#ifndef DDP_COMM_REPORTS_ROLL_CALL_H_
#define DDP_COMM_REPORTS_ROLL_CALL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/reports/report_log.h"

namespace ddp::internal {

// A question to all ranks of a group, through the store: where are you? The thread of each living
// process answers within milliseconds, even while its trainer is busy. So it tells the living from
// the dead as well. One rank asks for all, and tells the others what it has found.
//
// Thread-compatible. The methods throw what the store throws.
class RollCall {
 public:
  // Time within which a living process answers.
  static constexpr absl::Duration kAnswerTimeout = absl::Seconds(3);

  // `log` must outlive the object.
  explicit RollCall(ReportLog& log) : log_(log) {}

  // Asks. Does not ask, and returns false, when another rank has asked since `since_ns` (monotonic
  // clock).
  bool Ask(int64_t since_ns);
  void Forget() { question_.reset(); }
  bool asked() const { return question_.has_value(); }
  absl::Duration age() const;  // of the last question

  // Reads the answers to the last question, without waiting. Returns true when all other ranks have
  // answered. Sets answers(), and silent() to the ranks that have not answered. Returns false when
  // the last Ask() returned false.
  bool ReadAnswers();
  const std::map<int, std::string>& answers() const { return answers_; }
  const std::vector<int>& silent() const { return silent_; }

 private:
  ReportLog& log_;
  std::optional<int64_t> question_;
  int64_t asked_ns_ = 0;
  std::map<int, std::string> answers_;
  std::vector<int> silent_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_ROLL_CALL_H_
