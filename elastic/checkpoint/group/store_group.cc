#include "elastic/checkpoint/group/store_group.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "elastic/checkpoint/group/wire_status.h"

namespace ddp::elastic {
namespace {

constexpr char kAnswer[] = "answer";
constexpr char kProgress[] = "progress";
// A working rank reports progress more often than the waiting ranks check for it.
constexpr int kTellsPerTimeout = 16;
constexpr int kLooksPerTimeout = 4;

std::vector<uint8_t> ToBytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string ToText(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Cuts off the place of the throw, which follows the first line of LibTorch's messages.
std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

StoreGroup::StoreGroup(Options options) : options_(std::move(options)) {}

std::string StoreGroup::AttemptKey(const std::string& name) const {
  return absl::StrCat(options_.prefix, "/", instance_, "/", attempt_, "/", name);
}

std::string StoreGroup::RoundKey(const std::string& name) const {
  return AttemptKey(absl::StrCat(round_, "/", name));
}

std::string StoreGroup::ValueKey(int rank) const { return RoundKey(absl::StrCat("value/", rank)); }

void StoreGroup::StartAttempt() {
  // Rank 0 deletes the counter of progress, which all ranks share.
  if (attempt_ > 0 && options_.rank == 0) stale_keys_.push_back(AttemptKey(kProgress));
  ++attempt_;
  round_ = 0;
  failed_ = false;
}

void StoreGroup::Progress() {
  const absl::Time now = clock_.Now();
  if (instance_ == 0 || now - told_ < options_.timeout / kTellsPerTimeout) return;
  told_ = now;
  try {
    options_.store->add(AttemptKey(kProgress), 1);
  } catch (const std::exception&) {
    // The store is unreachable. The next Decide() reports that, if it lasts.
  }
}

absl::StatusOr<std::string> StoreGroup::Decide(const std::string& value, const Decision& decide) {
  const absl::Time start = clock_.Now();
  try {
    if (instance_ == 0) StartInstance();
    if (attempt_ == 0 || failed_) StartAttempt();
    absl::StatusOr<std::string> answer = options_.rank == 0 ? Lead(value, decide) : Follow(value);
    ++round_;
    failed_ = !answer.ok();
    return answer;
  } catch (const std::exception& error) {
    failed_ = true;
    const absl::Duration waited = clock_.Now() - start;
    const absl::Status status =
        waited < options_.timeout
            ? absl::UnavailableError(absl::StrCat(
                  "rank ", options_.rank,
                  " cannot reach the others through the store: ", FirstLine(error.what())))
            : absl::DeadlineExceededError(
                  absl::StrCat("rank ", options_.rank, " has waited ",
                               absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))),
                               " for ", Missing()));
    if (options_.rank == 0) GiveUp(status);
    return status;
  }
}

// A store may outlive a group, so keys contain the group's number: a group never reads the keys of
// an earlier one. Every rank counts for itself, because all make the same groups in the same order.
void StoreGroup::StartInstance() {
  instance_ = options_.store->add(absl::StrCat(options_.prefix, "/instances/", options_.rank), 1);
}

std::string StoreGroup::Lead(const std::string& value, const Decision& decide) {
  std::vector<std::string> keys;
  for (int rank = 1; rank < options_.world_size; ++rank) keys.push_back(ValueKey(rank));
  Await(keys);
  std::vector<std::string> values = Read(keys);
  values.insert(values.begin(), value);
  // Every rank is in this round, so no rank reads keys of earlier rounds any more.
  DeleteStaleKeys();
  std::string answer = decide(values);
  const std::string key = RoundKey(kAnswer);
  stale_keys_.push_back(key);
  options_.store->set(key, ToBytes(EncodeResult(answer)));
  return answer;
}

absl::StatusOr<std::string> StoreGroup::Follow(const std::string& value) {
  DeleteStaleKeys();
  const std::string key = ValueKey(options_.rank);
  stale_keys_.push_back(key);
  options_.store->set(key, ToBytes(value));
  const std::string answer_key = RoundKey(kAnswer);
  Await({answer_key});
  absl::StatusOr<std::string> answer = DecodeResult(Read({answer_key})[0]);
  DeleteStaleKeys();  // rank 0 has read this rank's value, or has failed
  if (answer.ok()) return answer;
  return absl::Status(
      answer.status().code(),
      absl::StrCat("rank ", options_.rank,
                   " has waited for rank 0, which gave up: ", answer.status().message()));
}

// Blocks until all `keys` are set. Throws the store's exception after the timeout. Progress of any
// rank restarts the timeout, because all ranks end in the same round.
void StoreGroup::Await(const std::vector<std::string>& keys) {
  if (keys.empty()) return;
  // Rank 0 has the shorter timeout, because only rank 0 can name the missing ranks.
  const absl::Duration look = options_.timeout / kLooksPerTimeout;
  const absl::Duration patience =
      options_.timeout + (options_.rank == 0 ? absl::ZeroDuration() : look);
  absl::Time deadline = clock_.Now() + patience;
  int64_t seen = -1;
  while (true) {
    const absl::Time start = clock_.Now();
    // Rounded up by 1 ms: else a wait that times out could look like one that failed early.
    const absl::Duration slice =
        std::min(look, std::max(deadline - start, absl::ZeroDuration())) + absl::Milliseconds(1);
    try {
      options_.store->wait(keys, absl::ToChronoMilliseconds(slice));
      return;
    } catch (const std::exception&) {
      const absl::Time now = clock_.Now();
      if (now - start < slice - absl::Milliseconds(1)) throw;  // failed before its timeout
      const int64_t progress = options_.store->add(AttemptKey(kProgress), 0);
      const bool moved = progress > std::max<int64_t>(seen, 0);
      seen = progress;
      if (moved) {
        deadline = now + patience;
        if (options_.on_progress != nullptr) options_.on_progress();
      }
      if (now >= deadline) throw;
    }
  }
}

std::vector<std::string> StoreGroup::Read(const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  if (options_.store->hasExtendedApi()) {
    for (const std::vector<uint8_t>& value : options_.store->multiGet(keys)) {
      values.push_back(ToText(value));
    }
  } else {
    for (const std::string& key : keys) values.push_back(ToText(options_.store->get(key)));
  }
  return values;
}

// Sets the error as the answer, so that a rank that is late for this attempt does not wait.
void StoreGroup::GiveUp(const absl::Status& status) {
  if (instance_ == 0) return;
  try {
    const std::string key = RoundKey(kAnswer);
    stale_keys_.push_back(key);
    options_.store->set(key, ToBytes(EncodeResult(status)));
  } catch (const std::exception&) {
    // The store has failed: the late rank waits until its own timeout.
  }
}

void StoreGroup::DeleteStaleKeys() {
  for (const std::string& key : stale_keys_) options_.store->deleteKey(key);
  stale_keys_.clear();
}

std::string StoreGroup::Missing() {
  if (options_.rank != 0) return "rank 0, which waits for the other ranks or is gone";
  std::vector<std::string> missing;
  for (int rank = 1; rank < options_.world_size; ++rank) {
    try {
      if (!options_.store->check({ValueKey(rank)})) missing.push_back(absl::StrCat(rank));
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
