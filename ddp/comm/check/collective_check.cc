#include "ddp/comm/check/collective_check.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {

CollectiveCheck::CollectiveCheck(std::shared_ptr<GroupStore> store,
                                 std::shared_ptr<FailureMonitor> monitor,
                                 const Membership& membership, absl::Duration timeout)
    : store_(std::move(store)),
      monitor_(std::move(monitor)),
      membership_(membership),
      timeout_(timeout) {}

CollectiveCheck::Result CollectiveCheck::Run(const CollectiveFingerprint& mine) {
  const int64_t sequence = sequence_++;
  StoreMeeting meeting(store_, absl::StrCat("check/", membership_.incarnation, "/", sequence),
                       membership_);
  MeetingEnd end;
  {
    const FailureMonitor::EndMeetingOnFailure guard(*monitor_, meeting.verdict_key());
    end = AttendMeeting(meeting, mine.Serialize(), timeout_);
  }
  if (end.verdict == FailureMonitor::kFailedVerdict) return {.peer_failed = true};
  if (!end.missing.empty()) {
    return {.error = absl::StrCat(RankList(end.missing), " did not come to collective ", sequence,
                                  " within ", absl::FormatDuration(timeout_), "; the others run ",
                                  mine.Describe())};
  }
  std::vector<CollectiveFingerprint> all;
  for (const std::string& text : meeting.Values()) {
    all.push_back(CollectiveFingerprint::Parse(text).value_or(CollectiveFingerprint()));
  }
  // All ranks have come to this meeting, so none is in the one before.
  if (previous_.has_value()) previous_->Forget();
  previous_ = std::move(meeting);
  return {.error = CompareFingerprints(sequence, all)};
}

}  // namespace ddp::internal
