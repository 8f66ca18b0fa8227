#include "ddp/comm/meeting/store_meeting.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ddp::internal {
namespace {

constexpr char kMissing[] = "missing ";

std::string ValueKey(const std::string& name, int rank) { return absl::StrCat(name, "/", rank); }
std::string CountKey(const std::string& name) { return absl::StrCat(name, "/count"); }

}  // namespace

StoreMeeting::StoreMeeting(std::shared_ptr<GroupStore> store, std::string name,
                           const Membership& membership)
    : store_(std::move(store)),
      name_(std::move(name)),
      rank_(membership.rank),
      size_(membership.size) {}

std::string StoreMeeting::VerdictKey(const std::string& name) {
  return absl::StrCat(name, "/verdict");
}

std::vector<std::string> StoreMeeting::Keys(const std::string& name, int size) {
  std::vector<std::string> keys = {VerdictKey(name), CountKey(name)};
  for (int rank = 0; rank < size; ++rank) keys.push_back(ValueKey(name, rank));
  return keys;
}

void StoreMeeting::Arrive(const std::string& value) {
  store_->Set(ValueKey(name_, rank_), value);
  if (store_->Add(CountKey(name_), 1) == size_) Decide(kMet);
}

bool StoreMeeting::HasArrived() { return store_->Has({ValueKey(name_, rank_)}); }

std::optional<std::string> StoreMeeting::AwaitVerdict(absl::Duration timeout) {
  if (!store_->Wait(verdict_key(), timeout)) return std::nullopt;
  return store_->Get(verdict_key());
}

std::string StoreMeeting::Decide(const std::string& verdict) {
  return store_->SetIfNew(verdict_key(), verdict);
}

std::vector<std::string> StoreMeeting::ValueKeys() const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(ValueKey(name_, rank));
  return keys;
}

std::vector<int> StoreMeeting::Missing() {
  const auto values = store_->GetPresent(ValueKeys());
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!values[rank].has_value()) missing.push_back(rank);
  }
  return missing;
}

std::vector<std::string> StoreMeeting::Values() { return store_->GetAll(ValueKeys()); }

void StoreMeeting::Forget() {
  store_->Delete(ValueKey(name_, rank_));
  if (rank_ != 0) return;
  store_->Delete(CountKey(name_));
  store_->Delete(verdict_key());
}

MeetingEnd AttendMeeting(StoreMeeting& meeting, const std::string& value, absl::Duration timeout) {
  meeting.Arrive(value);
  std::optional<std::string> verdict = meeting.AwaitVerdict(timeout);
  if (!verdict.has_value()) {
    const std::vector<int> missing = meeting.Missing();
    // If no rank is missing any more, the last one to arrive is about to write kMet, or has died.
    verdict = meeting.Decide(missing.empty() ? StoreMeeting::kMet
                                             : absl::StrCat(kMissing, absl::StrJoin(missing, ",")));
  }
  MeetingEnd end{.verdict = *verdict, .missing = {}};
  if (!absl::StartsWith(*verdict, kMissing)) return end;
  for (const auto word : absl::StrSplit(absl::StripPrefix(*verdict, kMissing), ',')) {
    int rank = -1;
    if (absl::SimpleAtoi(word, &rank)) end.missing.push_back(rank);
  }
  return end;
}

}  // namespace ddp::internal
