#include "ddp/comm/reports/report_log.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/process/process_identity.h"
#include "base/text_fields.h"
#include "ddp/comm/meeting/store_meeting.h"

namespace ddp::internal {
namespace {

// Length of one wait in the store; the thread then waits again. This bounds the destructor when the
// store is gone. A message or the destructor wakes the wait at once, so this is no polling
// interval. The time is long because LibTorch's TCPStore logs two warnings when a wait times out.
constexpr absl::Duration kWatchSlice = absl::Seconds(60);

// Time between a failure of the store and the next attempt.
constexpr absl::Duration kRetryInterval = absl::Seconds(5);

std::string EntryKey(int64_t entry) { return absl::StrCat("log/", entry); }

// Returns the key that wakes the thread of `rank`: because the entry is there, or because the
// rank's own destructor ends the thread.
std::string WakeKey(int rank, int64_t entry) { return absl::StrCat("wake/", rank, "/", entry); }

}  // namespace

std::string LogEntry::Serialize() const {
  if (kind == Kind::kFailure) return absl::StrCat("failure ", incarnation, " ", rank, " ", reason);
  return absl::StrCat("where ", incarnation, " ", number, " ", rank);
}

std::optional<LogEntry> LogEntry::Parse(absl::string_view text) {
  LogEntry entry;
  std::string kind;
  if (ReadFields(text, ' ', kind, entry.incarnation, entry.rank, entry.reason) &&
      kind == "failure") {
    return entry;
  }
  entry = {.kind = Kind::kWhere};
  const bool is_where = ReadFields(text, ' ', kind, entry.incarnation, entry.number, entry.rank);
  return is_where && kind == "where" ? std::optional<LogEntry>(entry) : std::nullopt;
}

ReportLog::ReportLog(std::shared_ptr<GroupStore> store, std::shared_ptr<GroupStore> watched,
                     const Membership& membership, Reader& reader)
    : store_(std::move(store)), reader_(reader), rank_(membership.rank), size_(membership.size) {
  if (size_ > 1) store_->Set(StandingKey(rank_), absl::StrCat("process ", ProcessIdentity()));
  thread_ = std::thread([this, watched = std::move(watched)] { WatchStore(*watched); });
  pthread_setname_np(thread_.native_handle(), "ddp-failure");
}

ReportLog::~ReportLog() {
  std::string wake_key;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    stopping_changed_.NotifyAll();
    wake_key = WakeKey(rank_, next_entry_);
  }
  std::atomic<bool> store_answers{false};
  writes_.Run([&] {
    try {
      store_->Set(wake_key, "1");
      store_answers = true;
    } catch (const std::exception& error) {
      LOG_IF(WARNING, !store_lost_)
          << "rank " << rank_
          << ": the store is gone at the end of the process group: " << error.what();
    }
  });
  thread_.join();
  writes_.Flush();
  if (!store_answers) return;
  writes_.Run([&] {
    try {
      store_->Delete(wake_key);  // no other rank waits for this key
    } catch (const std::exception&) {
      // The store is gone, and the key with it.
    }
  });
  writes_.Flush();
}

void ReportLog::Leave(int64_t incarnation, int64_t collectives) {
  bool has_answered = false;
  bool has_left = false;
  {
    MutexLock lock(mutex_);
    has_answered = has_answered_;
    has_left = std::exchange(left_, true);
  }
  if (has_left || size_ == 1) return writes_.Flush();
  writes_.Run([&] {
    try {
      store_->Set(StandingKey(rank_), absl::StrCat("left ", incarnation, " ", collectives));
      const GroupFailure left{.rank = rank_, .reason = "it has left the process group"};
      store_->SetIfNew(StoreMeeting::VerdictKey(RenewalName(incarnation + 1)), GoneVerdict(left));
      if (has_answered) store_->Delete(AnswerKey(rank_));
    } catch (const std::exception& error) {
      store_lost_ = true;
      LOG(WARNING) << "rank " << rank_ << ": could not tell the other ranks that this one "
                   << "leaves the process group: " << error.what();
    }
  });
  writes_.Flush();
}

std::string ReportLog::AnswerKey(int rank) { return absl::StrCat("where/", rank); }

std::string ReportLog::StandingKey(int rank) { return absl::StrCat("standing/", rank); }

std::string ReportLog::RenewalName(int64_t incarnation) {
  return absl::StrCat("renewal/", incarnation);
}

std::string ReportLog::GoneVerdict(const GroupFailure& failure) {
  return absl::StrCat("gone ", failure.rank, " ", failure.reason);
}

std::optional<GroupFailure> ReportLog::ParseGoneVerdict(const std::string& verdict) {
  std::string word;
  GroupFailure failure;
  const bool read = ReadFields(verdict, ' ', word, failure.rank, failure.reason);
  return read && word == "gone" ? std::optional<GroupFailure>(failure) : std::nullopt;
}

// compareSet gives an empty entry to one author. An author may have died before it woke the ranks;
// the next author wakes them for that entry as well.
std::optional<LogEntry> ReportLog::Append(const LogEntry& message) {
  const std::string text = message.Serialize();
  int64_t entry = 0;
  {
    MutexLock lock(mutex_);
    entry = next_entry_;
  }
  const int64_t first = entry;
  for (;; ++entry) {
    const std::string found = store_->SetIfNew(EntryKey(entry), text);
    if (found == text) break;
    const std::optional<LogEntry> other = LogEntry::Parse(found);
    if (!other.has_value() || other->kind != message.kind) continue;
    // All ranks read that entry already. Thousands of ranks that fail together make one entry.
    const bool same =
        message.kind == LogEntry::Kind::kFailure
            ? other->incarnation >= message.incarnation
            : message.kind == LogEntry::Kind::kWhere && other->number >= message.number;
    if (same) return other;
  }
  std::vector<std::string> keys;
  for (int64_t missed = first; missed <= entry; ++missed) {
    for (int rank = 0; rank < size_; ++rank) keys.push_back(WakeKey(rank, missed));
  }
  store_->SetAll(keys, "1");
  return std::nullopt;
}

std::optional<int64_t> ReportLog::AskWhere(int64_t incarnation, int64_t since_ns) {
  LogEntry message{.kind = LogEntry::Kind::kWhere, .incarnation = incarnation, .rank = rank_};
  {
    MutexLock lock(mutex_);
    if (last_question_ns_ > since_ns) return std::nullopt;
    message.number = last_question_ + 1;
  }
  if (Append(message).has_value()) return std::nullopt;
  MutexLock lock(mutex_);
  last_question_ = std::max(last_question_, message.number);  // before the thread has read it
  return message.number;
}

ReportLog::Answers ReportLog::ReadAnswers(int64_t number) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(AnswerKey(rank));
  const std::vector<std::optional<std::string>> found = store_->GetPresent(keys);
  Answers answers;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;  // its own thread may not have answered yet
    int64_t answered = 0;
    std::string answer;
    // An answer to a later question is one to this question.
    if (ReadFields(found[rank].value_or(""), ' ', answered, answer) && answered >= number) {
      answers.by_rank[rank] = answer;
    } else {
      answers.silent.push_back(rank);
    }
  }
  return answers;
}

void ReportLog::WatchStore(GroupStore& store) {
  bool lost = false;
  while (true) {
    int64_t entry = 0;
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
      entry = next_entry_;
    }
    try {
      if (store.Wait(WakeKey(rank_, entry), kWatchSlice)) ReadEntries(store, entry);
      lost = false;
    } catch (const std::exception& error) {
      // Losing the store does not stop training: collectives still have their timeouts.
      LOG_IF(WARNING, !lost) << "rank " << rank_ << ": no word of failing peers until the store "
                             << "answers again: " << error.what();
      lost = true;
      if (!AwaitRetry(kRetryInterval)) return;
    }
  }
}

// Blocks for `interval`. Returns false when the destructor runs.
bool ReportLog::AwaitRetry(absl::Duration interval) {
  const MonotonicClock clock;
  const absl::Time next = clock.Now() + interval;
  MutexLock lock(mutex_);
  while (!stopping_ && clock.Now() < next) {
    stopping_changed_.WaitFor(mutex_, next - clock.Now());
  }
  return !stopping_;
}

// Reads all new entries of the log, from `entry` on.
void ReportLog::ReadEntries(GroupStore& store, int64_t entry) {
  for (; store.Has({EntryKey(entry)}); ++entry) {
    const std::optional<LogEntry> message = LogEntry::Parse(store.Get(EntryKey(entry)));
    if (message.has_value()) HandleMessage(store, *message);
    store.Delete(WakeKey(rank_, entry));
    MutexLock lock(mutex_);
    next_entry_ = entry + 1;
  }
}

void ReportLog::HandleMessage(GroupStore& store, const LogEntry& message) {
  if (message.kind == LogEntry::Kind::kFailure) {
    return reader_.OnFailureRead(message.incarnation,
                                 {.rank = message.rank, .reason = message.reason});
  }
  {
    MutexLock lock(mutex_);
    last_question_ = std::max(last_question_, message.number);
    last_question_ns_ = MonotonicNanoseconds();
    if (left_) return;
    has_answered_ = true;
  }
  store.Set(AnswerKey(rank_),
            absl::StrCat(message.number, " ", reader_.OnAsked(message.incarnation)));
}

}  // namespace ddp::internal
