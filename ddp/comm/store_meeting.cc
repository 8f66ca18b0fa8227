#include "ddp/comm/store_meeting.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

constexpr char kMissing[] = "missing ";

}  // namespace

StoreMeeting::StoreMeeting(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank,
                           int size)
    : store_(std::move(store)), name_(std::move(name)), rank_(rank), size_(size) {}

std::string StoreMeeting::VerdictKey(const std::string& name) {
  return absl::StrCat(name, "/verdict");
}

std::string StoreMeeting::ValueKey(int rank) const { return absl::StrCat(name_, "/", rank); }

void StoreMeeting::Arrive(const std::string& value) {
  store_->set(ValueKey(rank_), value);
  if (store_->add(absl::StrCat(name_, "/count"), 1) == size_) Decide(kMet);
}

bool StoreMeeting::HasArrived() { return store_->check({ValueKey(rank_)}); }

std::optional<std::string> StoreMeeting::AwaitVerdict(absl::Duration timeout) {
  const std::chrono::milliseconds limit =
      std::max(absl::ToChronoMilliseconds(timeout), std::chrono::milliseconds(1));
  const int64_t start_ns = MonotonicNanoseconds();
  try {
    store_->wait({verdict_key()}, limit);
  } catch (const std::exception&) {
    // The exception's type does not say whether the store is lost or the wait timed out. A lost
    // store throws again at the next command.
    const absl::Duration waited = absl::Nanoseconds(MonotonicNanoseconds() - start_ns);
    if (waited < absl::FromChrono(limit) * 0.9) throw;
    return std::nullopt;
  }
  return store_->get_to_str(verdict_key());
}

std::string StoreMeeting::Decide(const std::string& verdict) {
  return store_->compareSet(verdict_key(), std::string(), verdict);
}

std::vector<int> StoreMeeting::Missing() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(ValueKey(rank));
  std::vector<int> missing;
  if (store_->check(keys)) return missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!store_->check({keys[rank]})) missing.push_back(rank);
  }
  return missing;
}

std::vector<std::string> StoreMeeting::Values() {
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(ValueKey(rank));
  if (store_->hasExtendedApi()) {
    for (const std::vector<uint8_t>& value : store_->multiGet(keys)) {
      values.emplace_back(value.begin(), value.end());
    }
  } else {
    for (const std::string& key : keys) values.push_back(store_->get_to_str(key));
  }
  return values;
}

void StoreMeeting::Forget() {
  store_->deleteKey(ValueKey(rank_));
  if (rank_ != 0) return;
  store_->deleteKey(absl::StrCat(name_, "/count"));
  store_->deleteKey(verdict_key());
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

std::string RankList(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace ddp::internal
