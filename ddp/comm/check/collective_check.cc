#include "ddp/comm/check/collective_check.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/comm/check/mismatch.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {

CollectiveCheck::CollectiveCheck(std::shared_ptr<GroupStore> store,
                                 std::shared_ptr<FailureMonitor> monitor,
                                 const Membership& membership, absl::Duration timeout)
    : store_(std::move(store)),
      monitor_(std::move(monitor)),
      membership_(membership),
      timeout_(timeout) {}

CollectiveCheck::Result CollectiveCheck::Run(const CollectiveRecord& mine) {
  const int64_t sequence = sequence_++;
  StoreMeeting meeting(store_, absl::StrCat("check/", membership_.incarnation, "/", sequence),
                       membership_);
  const std::optional<MeetingEnd> end = monitor_->Attend(meeting, mine.Serialize(), timeout_);
  if (!end.has_value()) return {.peer_failed = true};
  if (!end->missing.empty()) {
    return {.error = absl::StrCat(RankList(end->missing), " did not come to collective ", sequence,
                                  " within ", absl::FormatDuration(timeout_), "; the others run ",
                                  mine.DescribeTensor())};
  }
  std::vector<CollectiveRecord> all;
  for (const std::string& text : meeting.Values()) {
    all.push_back(CollectiveRecord::Parse(text).value_or(CollectiveRecord()));
  }
  // All ranks have come to this meeting, so none is in the one before.
  if (previous_.has_value()) previous_->Forget();
  previous_ = std::move(meeting);
  return {.error = DescribeDifference(sequence, all)};
}

}  // namespace ddp::internal
