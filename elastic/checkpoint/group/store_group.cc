#include "elastic/checkpoint/group/store_group.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/group/wire_status.h"

namespace ddp::elastic {
namespace {

constexpr char kAnswer[] = "answer";
constexpr char kProgress[] = "progress";
// A working rank reports progress more often than the waiting ranks check for it. The bounds hold
// for a long timeout: a waiting rank reports to its agent each time it sees progress.
constexpr int kTellsPerTimeout = 16;
constexpr int kLooksPerTimeout = 4;
constexpr absl::Duration kTellIntervalMax = absl::Seconds(15);
constexpr absl::Duration kLookIntervalMax = absl::Seconds(5);
// Between the tries to set an error.
constexpr absl::Duration kPause = absl::Milliseconds(100);
// A bound. Keys accumulate only while the store refuses to delete them.
constexpr size_t kStaleKeysMax = 1000;

std::vector<uint8_t> ToBytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string ToText(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Cuts off the place of the throw, which follows the first line of LibTorch's messages.
std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

StoreGroup::StoreGroup(Options options)
    : options_(std::move(options)), store_(options_.store.get()) {}

StoreGroup::~StoreGroup() { EndTelling(); }

absl::Time StoreGroup::Now() const {
  return options_.clock != nullptr ? options_.clock->Now() : monotonic_clock_.Now();
}

std::string StoreGroup::AttemptKey(const std::string& name) const {
  return absl::StrCat(options_.prefix, "/", instance_, "/", attempt_, "/", name);
}

std::string StoreGroup::RoundKey(int64_t round, const std::string& name) const {
  return AttemptKey(absl::StrCat(round, "/", name));
}

std::string StoreGroup::ValueKey(int64_t round, int rank) const {
  return RoundKey(round, absl::StrCat("value/", rank));
}

// Returns the key of this rank's instance, which stays as long as the store does.
std::string StoreGroup::InstanceKey() const {
  return absl::StrCat(options_.prefix, "/instances/", options_.rank);
}

// Returns the key that this rank sets in `round`.
std::string StoreGroup::OwnKey(int64_t round) const {
  return options_.rank == 0 ? RoundKey(round, kAnswer) : ValueKey(round, options_.rank);
}

void StoreGroup::StartAttempt(Patience patience) {
  EndTelling();
  patience_ = patience;
  // Rank 0 deletes the counter of progress, which all ranks share.
  if (attempt_ > 0 && instance_ > 0 && options_.rank == 0) {
    stale_keys_.push_back(AttemptKey(kProgress));
  }
  ++attempt_;
  round_ = 0;
  failed_ = false;
}

void StoreGroup::Progress() {
  const absl::Time now = Now();
  const absl::Duration interval = std::min(options_.timeout / kTellsPerTimeout, kTellIntervalMax);
  // After a failure the teller may run, and no rank waits for this one.
  if (failed_ || instance_ == 0 || now - told_ < interval) return;
  told_ = now;
  try {
    store_->add(AttemptKey(kProgress), 1);
  } catch (const std::exception&) {
    // The store is unreachable. The next Decide() reports that, if it lasts.
  }
}

void StoreGroup::Leave(const absl::Status& error) {
  if (attempt_ == 0 || failed_) StartAttempt(patience_);
  failed_ = true;
  Tell(error);
}

absl::StatusOr<std::string> StoreGroup::Decide(const std::string& value, const Decision& decide) {
  if (attempt_ == 0 || failed_) StartAttempt(patience_);
  const absl::StatusOr<std::string> text = Exchange(value, decide);
  if (!text.ok()) {
    failed_ = true;
    Tell(text.status());
    return text.status();
  }
  ++round_;
  absl::StatusOr<std::string> answer = DecodeResult(*text);
  if (answer.ok()) return answer;
  failed_ = true;
  return absl::Status(
      answer.status().code(),
      absl::StrCat("rank ", options_.rank,
                   " has waited for rank 0, which gave up: ", answer.status().message()));
}

// Returns the encoded answer of this round.
absl::StatusOr<std::string> StoreGroup::Exchange(const std::string& value, const Decision& decide) {
  try {
    store_ = patience_ == Patience::kShort ? &Hasty() : options_.store.get();
    StartInstance();
    return options_.rank == 0 ? Lead(value, decide) : Follow(value);
  } catch (const std::exception& error) {
    return Unreachable(error);
  }
}

absl::Status StoreGroup::Unreachable(const std::exception& error) const {
  return absl::UnavailableError(
      absl::StrCat("rank ", options_.rank,
                   " cannot reach the others through the store: ", FirstLine(error.what())));
}

absl::Status StoreGroup::Probe() {
  try {
    (void)Hasty().check({InstanceKey()});
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return Unreachable(error);
  }
}

// Returns a view of the store with the short timeout. Throws when the store cannot be cloned now.
c10d::Store& StoreGroup::Hasty() {
  if (hasty_ == nullptr) {
    c10::intrusive_ptr<c10d::Store> clone = options_.store->clone();
    clone->setTimeout(absl::ToChronoMilliseconds(options_.store_patience));
    hasty_ = std::move(clone);
  }
  return *hasty_;
}

// A store may outlive a group, so keys contain the group's number: a group never reads the keys of
// an earlier one. Every rank counts for itself, because all make the same groups in the same order.
// The two calls may be repeated after an exception. An add() of 1 may not: the store may have
// applied it.
void StoreGroup::StartInstance() {
  if (instance_ > 0) return;
  const std::string key = InstanceKey();
  if (wanted_instance_ == 0) wanted_instance_ = store_->add(key, 0) + 1;
  store_->set(key, ToBytes(absl::StrCat(wanted_instance_)));
  instance_ = wanted_instance_;
}

absl::StatusOr<std::string> StoreGroup::Lead(const std::string& value, const Decision& decide) {
  std::vector<std::string> keys;
  for (int rank = 1; rank < options_.world_size; ++rank) keys.push_back(ValueKey(round_, rank));
  DDP_RETURN_IF_ERROR(Await(keys));
  std::vector<std::string> values = {value};
  for (const std::string& text : Read(keys)) {
    // An error is that of a rank that has left the attempt.
    DDP_ASSIGN_OR_RETURN(std::string other, DecodeResult(text));
    values.push_back(std::move(other));
  }
  // Every rank is in this round, so no rank reads keys of earlier rounds any more.
  DeleteStaleKeys();
  std::string answer = EncodeResult(decide(values));
  Set(OwnKey(round_), answer);
  return answer;
}

absl::StatusOr<std::string> StoreGroup::Follow(const std::string& value) {
  Set(OwnKey(round_), EncodeResult(value));
  const std::string answer_key = RoundKey(round_, kAnswer);
  DDP_RETURN_IF_ERROR(Await({answer_key}));
  std::string answer = Read({answer_key})[0];
  DeleteStaleKeys();  // rank 0 has read this rank's value, or has failed
  return answer;
}

// Blocks until all `keys` are set. kDeadlineExceeded after the timeout. Progress of any rank
// restarts the timeout, because all ranks end in the same round. Passes on the store's exceptions.
absl::Status StoreGroup::Await(const std::vector<std::string>& keys) {
  if (keys.empty()) return absl::OkStatus();
  const absl::Time begin = Now();
  const absl::Duration look = std::min(options_.timeout / kLooksPerTimeout, kLookIntervalMax);
  // Rank 0 has the shorter timeout, because only rank 0 can name the missing ranks.
  const absl::Duration patience = options_.rank == 0
                                      ? options_.timeout
                                      : options_.timeout + options_.timeout / kLooksPerTimeout;
  absl::Time last_move = begin;
  absl::Time deadline = begin + patience;
  int64_t seen = -1;
  while (true) {
    const absl::Time start = Now();
    // Rounded up by 1 ms: else a wait that times out could look like one that failed early.
    const absl::Duration slice =
        std::min(look, std::max(deadline - start, absl::ZeroDuration())) + absl::Milliseconds(1);
    try {
      store_->wait(keys, absl::ToChronoMilliseconds(slice));
      return absl::OkStatus();
    } catch (const std::exception&) {
      if (Now() - start < slice - absl::Milliseconds(1)) throw;  // failed before its timeout
    }
    // A later generation of the job deletes the store of this one, and nobody will set the keys.
    if (!store_->check({InstanceKey()})) {
      return absl::UnavailableError(absl::StrCat(
          "rank ", options_.rank, " cannot reach the others: the store's keys of this generation ",
          "are gone, so a later one has begun"));
    }
    const int64_t progress = store_->add(AttemptKey(kProgress), 0);
    const absl::Time now = Now();
    const bool moved = progress > std::max<int64_t>(seen, 0);
    seen = progress;
    if (moved) {
      last_move = now;
      deadline = now + patience;
      if (options_.on_progress != nullptr) options_.on_progress();
    }
    if (hurries_) deadline = std::min(deadline, last_move + options_.store_patience);
    if (now < deadline) continue;
    return absl::DeadlineExceededError(absl::StrCat(
        "rank ", options_.rank, " has waited ",
        absl::FormatDuration(absl::Trunc(now - begin, absl::Milliseconds(1))), " for ", Missing()));
  }
}

std::vector<std::string> StoreGroup::Read(const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  if (store_->hasExtendedApi()) {
    for (const std::vector<uint8_t>& value : store_->multiGet(keys)) {
      values.push_back(ToText(value));
    }
  } else {
    for (const std::string& key : keys) values.push_back(ToText(store_->get(key)));
  }
  return values;
}

// Sets one of this rank's keys, to be deleted when no rank reads it any more.
void StoreGroup::Set(const std::string& key, const std::string& text) {
  if (std::find(stale_keys_.begin(), stale_keys_.end(), key) == stale_keys_.end()) {
    stale_keys_.push_back(key);
  }
  store_->set(key, ToBytes(text));
}

// Sets `error` in place of this rank's value or answer, so that no other rank waits for this one.
// A rank that has the answer of this round already, or has read this rank's value, finds the error
// in the next round. A thread does it, because the store may be away: this rank goes on, and the
// others learn of its error when the store is back.
void StoreGroup::Tell(const absl::Status& error) {
  try {
    store_ = &Hasty();
    // After a timeout the store answers, and one try is enough: the others have waited for as long.
    // Done at once, so that a rank that comes next does not find this rank's value.
    if (absl::IsDeadlineExceeded(error)) return void(TrySetError(EncodeResult(error)));
    telling_ends_ = false;
    teller_ =
        std::thread([this, text = EncodeResult(error), deadline = Now() + options_.timeout / 2] {
          while (!TrySetError(text) && !telling_ends_ && Now() + kPause <= deadline) Pause(kPause);
        });
  } catch (const std::exception&) {
    // The store cannot be reached at all, or there is no thread. The others wait until their own
    // timeouts.
  }
}

bool StoreGroup::TrySetError(const std::string& text) {
  try {
    StartInstance();
    for (const int64_t round : {round_, round_ + 1}) Set(OwnKey(round), text);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Blocks for one call of the store at most. While the teller runs, no other thread uses the members
// that it writes.
void StoreGroup::EndTelling() {
  telling_ends_ = true;
  if (teller_.joinable()) teller_.join();
}

void StoreGroup::DeleteStaleKeys() {
  while (!stale_keys_.empty()) {
    try {
      store_->deleteKey(stale_keys_.back());
    } catch (const std::exception&) {
      // The next call tries again. The other keys are not tried: a store that is out of reach
      // would block once for each.
      if (stale_keys_.size() > kStaleKeysMax) stale_keys_.clear();
      return;
    }
    stale_keys_.pop_back();
  }
}

std::string StoreGroup::Missing() {
  if (options_.rank != 0) return "rank 0, which waits for the other ranks or is gone";
  std::vector<std::string> missing;
  for (int rank = 1; rank < options_.world_size; ++rank) {
    try {
      if (!store_->check({ValueKey(round_, rank)})) missing.push_back(absl::StrCat(rank));
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
