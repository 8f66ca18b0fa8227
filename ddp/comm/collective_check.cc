#include "ddp/comm/collective_check.h"

#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/comm/failure_notice.h"

namespace ddp::internal {

CollectiveCheck::CollectiveCheck(c10::intrusive_ptr<c10d::Store> store,
                                 std::shared_ptr<FailureNotice> notice, const Options& options)
    : store_(std::move(store)), notice_(std::move(notice)), options_(options) {}

CollectiveCheck::Result CollectiveCheck::Run(const CollectiveFingerprint& mine) {
  const int64_t sequence = sequence_++;
  StoreMeeting meeting(store_, absl::StrCat("check/", options_.incarnation, "/", sequence),
                       options_.rank, options_.size);
  MeetingEnd end;
  {
    const FailureNotice::EndMeetingOnFailure guard(*notice_, meeting.verdict_key());
    end = AttendMeeting(meeting, mine.Serialize(), options_.timeout);
  }
  if (end.verdict == FailureNotice::kFailedVerdict) return {.peer_failed = true};
  if (!end.missing.empty()) {
    return {.error = absl::StrCat(RankList(end.missing), " did not come to collective ", sequence,
                                  " within ", absl::FormatDuration(options_.timeout),
                                  "; the others run ", mine.Describe())};
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
