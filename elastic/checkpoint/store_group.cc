#include "elastic/checkpoint/store_group.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"

namespace ddp::elastic {
namespace {

std::vector<uint8_t> ToBytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string ToText(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// LibTorch's messages end with where they were thrown.
std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

StoreGroup::StoreGroup(Options options) : options_(std::move(options)) {}

std::string StoreGroup::ValueKey(int64_t round, int rank) const {
  return absl::StrCat(options_.prefix, "/", instance_, "/", round, "/value/", rank);
}

std::string StoreGroup::AnswerKey(int64_t round) const {
  return absl::StrCat(options_.prefix, "/", instance_, "/", round, "/answer");
}

absl::StatusOr<std::string> StoreGroup::Decide(const std::string& value, const Decision& decide) {
  const absl::Time start = MonotonicClock().Now();
  try {
    if (instance_ == 0) StartInstance();
    std::string answer = options_.rank == 0 ? Lead(value, decide) : Follow(value);
    ++round_;
    return answer;
  } catch (const std::exception& error) {
    const absl::Duration waited = MonotonicClock().Now() - start;
    if (waited < options_.timeout) {
      return absl::UnavailableError(
          absl::StrCat("rank ", options_.rank,
                       " cannot reach the others through the store: ", FirstLine(error.what())));
    }
    return absl::DeadlineExceededError(absl::StrCat(
        "rank ", options_.rank, " has waited ",
        absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " for ", Missing()));
  }
}

// A store may outlive a group: the keys of the one before must not be taken for ours. Every rank
// counts for itself, and they count alike, since all make the same groups in the same order.
void StoreGroup::StartInstance() {
  instance_ = options_.store->add(absl::StrCat(options_.prefix, "/instances/", options_.rank), 1);
}

std::string StoreGroup::Lead(const std::string& value, const Decision& decide) {
  const absl::Time deadline = MonotonicClock().Now() + options_.timeout;
  std::vector<std::string> values = {value};
  for (int rank = 1; rank < options_.world_size; ++rank) {
    values.push_back(WaitFor(ValueKey(round_, rank), deadline));
  }
  // Everybody is in this round, so nobody reads the last one's keys any more.
  if (round_ > 0) DeleteRound(round_ - 1);
  std::string answer = decide(values);
  options_.store->set(AnswerKey(round_), ToBytes(answer));
  return answer;
}

std::string StoreGroup::Follow(const std::string& value) {
  options_.store->set(ValueKey(round_, options_.rank), ToBytes(value));
  return WaitFor(AnswerKey(round_), MonotonicClock().Now() + options_.timeout);
}

std::string StoreGroup::WaitFor(const std::string& key, absl::Time deadline) {
  // Rounded up: a wait that ends in time is not to look like one that ended early.
  const absl::Duration left = std::max(deadline - MonotonicClock().Now(), absl::ZeroDuration());
  options_.store->wait({key}, absl::ToChronoMilliseconds(left + absl::Milliseconds(1)));
  return ToText(options_.store->get(key));
}

void StoreGroup::DeleteRound(int64_t round) {
  for (int rank = 1; rank < options_.world_size; ++rank) {
    options_.store->deleteKey(ValueKey(round, rank));
  }
  options_.store->deleteKey(AnswerKey(round));
}

std::string StoreGroup::Missing() {
  if (options_.rank != 0) return "rank 0, which waits for the other ranks or is gone";
  std::vector<std::string> missing;
  for (int rank = 1; rank < options_.world_size; ++rank) {
    try {
      if (!options_.store->check({ValueKey(round_, rank)})) missing.push_back(absl::StrCat(rank));
    } catch (const std::exception&) {
      return "the other ranks, and the store does not answer";
    }
  }
  const bool many = missing.size() > 8;
  if (many) missing.resize(8);
  return absl::StrCat(missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "),
                      many ? ", ..." : "");
}

}  // namespace ddp::elastic
