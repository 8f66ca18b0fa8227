#include "ddp/comm/failure_notice.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/comm/collective_log.h"
#include "ddp/comm/notice_message.h"
#include "ddp/comm/process_identity.h"
#include "ddp/comm/store_meeting.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/health/group_failure.h"
#include "ddp/health/group_health.h"

namespace ddp::internal {
namespace {

// Length of one wait in the store; the thread then waits again. This bounds the destructor when the
// store is gone. A message or the destructor wakes the wait at once, so this is no polling
// interval. The time is long because LibTorch's TCPStore logs two warnings when a wait times out.
constexpr std::chrono::seconds kWatchSlice{60};

// Time between a failure of the store and the next attempt.
constexpr absl::Duration kRetryInterval = absl::Seconds(5);

std::string EntryKey(int64_t entry) { return absl::StrCat("log/", entry); }

// Returns the key that wakes the thread of `rank`: because the entry is there, or because the
// rank's own destructor ends the thread.
std::string WakeKey(int rank, int64_t entry) { return absl::StrCat("wake/", rank, "/", entry); }

void SetAll(c10d::Store& store, const std::vector<std::string>& keys) {
  const std::vector<uint8_t> value = {'1'};
  if (store.hasExtendedApi()) {
    store.multiSet(keys, std::vector<std::vector<uint8_t>>(keys.size(), value));
  } else {
    for (const std::string& key : keys) store.set(key, value);
  }
}

}  // namespace

struct FailureNotice::State {
  explicit State(int rank) : health(rank) {}

  mutable Mutex mutex;
  mutable CondVar changed;
  std::atomic<bool> failed{false};  // health.failed(), readable without the mutex
  GroupHealth health ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  int64_t next_entry ABSL_GUARDED_BY(mutex) = 0;  // the first one that the thread has not read
  std::string meeting ABSL_GUARDED_BY(mutex);     // verdict key, or empty
  std::shared_ptr<const CollectiveLog> log ABSL_GUARDED_BY(mutex);
  bool left ABSL_GUARDED_BY(mutex) = false;
  int64_t last_question ABSL_GUARDED_BY(mutex) = 0;  // highest number seen of any AskWhere()
  int64_t last_question_ns ABSL_GUARDED_BY(mutex) = 0;
  std::string last_position ABSL_GUARDED_BY(mutex);  // key of this rank's last answer, or empty
};

struct FailureNotice::Thread {
  std::thread thread;
};

FailureNotice::FailureNotice(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                             std::chrono::milliseconds command_timeout)
    : rank_(rank),
      size_(size),
      store_(std::move(store)),
      state_(std::make_shared<State>(rank)),
      thread_(std::make_unique<Thread>()) {
  const c10::intrusive_ptr<c10d::Store> watched = store_->clone();
  if (command_timeout.count() > 0) {
    // Set after the store has connected, because connecting may take longer on a busy host.
    store_->setTimeout(command_timeout);
    watched->setTimeout(command_timeout);
  }
  const std::optional<ProcessIdentity> self = ProcessIdentity::OfThisProcess();
  if (size_ > 1 && self.has_value()) {
    store_->set(StandingKey(rank_), absl::StrCat("process ", self->Serialize()));
  }
  thread_->thread = std::thread([this, watched] { WatchStore(*watched); });
  pthread_setname_np(thread_->thread.native_handle(), "ddp-failure");
}

FailureNotice::~FailureNotice() {
  Leave();
  int64_t entry = 0;
  bool store_answers = false;
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    state_->changed.NotifyAll();
    entry = state_->next_entry;
  }
  try {
    store_->set(WakeKey(rank_, entry), std::string("1"));
    store_answers = true;
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << rank_
                 << ": the store is gone at the end of the process group: " << error.what();
  }
  thread_->thread.join();
  if (!store_answers) return;
  try {
    store_->deleteKey(WakeKey(rank_, entry));  // no other rank waits for this key
  } catch (const std::exception&) {
    // The store is gone, and the key with it.
  }
}

void FailureNotice::Leave() {
  int64_t incarnation = 0;
  std::shared_ptr<const CollectiveLog> log;
  std::string position;
  {
    MutexLock lock(state_->mutex);
    if (std::exchange(state_->left, true) || size_ == 1) return;
    incarnation = state_->health.incarnation();
    log = state_->log;
    position = state_->last_position;
  }
  try {
    store_->set(StandingKey(rank_),
                absl::StrCat("left ", incarnation, " ", log ? log->launched() : 0));
    const Failure left{.rank = rank_, .reason = "it has left the process group"};
    store_->compareSet(StoreMeeting::VerdictKey(RenewalName(incarnation + 1)), std::string(),
                       GoneVerdict(left));
    if (!position.empty()) store_->deleteKey(position);
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << rank_ << ": could not tell the other ranks that this one leaves "
                 << "the process group: " << error.what();
  }
}

std::string FailureNotice::AliveKey(int64_t incarnation, int64_t number, int rank) {
  return absl::StrCat("alive/", incarnation, "/", number, "/", rank);
}

std::string FailureNotice::PositionKey(int64_t incarnation, int64_t number, int rank) {
  return absl::StrCat("where/", incarnation, "/", number, "/", rank);
}

std::string FailureNotice::StandingKey(int rank) { return absl::StrCat("standing/", rank); }

std::string FailureNotice::RenewalName(int64_t incarnation) {
  return absl::StrCat("renewal/", incarnation);
}

std::string FailureNotice::GoneVerdict(const Failure& failure) {
  return absl::StrCat("gone ", failure.rank, " ", failure.reason);
}

std::optional<FailureNotice::Failure> FailureNotice::ParseGoneVerdict(const std::string& verdict) {
  const std::vector<std::string> words = absl::StrSplit(verdict, absl::MaxSplits(' ', 2));
  Failure failure;
  if (words.size() != 3 || words[0] != "gone" || !absl::SimpleAtoi(words[1], &failure.rank)) {
    return std::nullopt;
  }
  failure.reason = words[2];
  return failure;
}

// Sets the failure. Returns false when this incarnation has one already, another incarnation has
// begun, or the destructor is running.
bool FailureNotice::SetFailure(int64_t incarnation, const Failure& failure) {
  MutexLock lock(state_->mutex);
  if (state_->stopping || !state_->health.OnFailure(incarnation, failure)) return false;
  state_->failed = true;
  state_->changed.NotifyAll();
  return true;
}

void FailureNotice::Report(const std::string& reason) {
  const Failure failure{.rank = rank_, .reason = reason};
  const NoticeMessage message{.kind = NoticeMessage::Kind::kFailure,
                              .incarnation = incarnation(),
                              .rank = rank_,
                              .reason = reason};
  if (!SetFailure(message.incarnation, failure) || size_ == 1) return;
  try {
    Publish(message);
    EndMeeting(*store_);
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << rank_ << ": could not tell the other ranks that this one failed ("
                 << reason << "): " << error.what();
  }
}

void FailureNotice::ReportFound(const Failure& failure) {
  if (failed()) return;
  const NoticeMessage message{.kind = NoticeMessage::Kind::kFailure,
                              .incarnation = incarnation(),
                              .rank = failure.rank,
                              .reason = failure.reason};
  Failure first = failure;
  try {
    const std::optional<NoticeMessage> earlier = Publish(message);
    if (earlier.has_value() && earlier->incarnation == message.incarnation) {
      first = {.rank = earlier->rank, .reason = earlier->reason};
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << rank_ << ": could not tell the other ranks of a failure ("
                 << failure.reason << "): " << error.what();
  }
  SetFailure(message.incarnation, first);
}

void FailureNotice::Ping(int64_t incarnation, int64_t number, const std::vector<int>& ranks) {
  Publish({.kind = NoticeMessage::Kind::kPing,
           .incarnation = incarnation,
           .number = number,
           .ranks = ranks});
}

std::optional<int64_t> FailureNotice::AskWhere(int64_t since_ns) {
  NoticeMessage message{.kind = NoticeMessage::Kind::kWhere, .rank = rank_};
  {
    MutexLock lock(state_->mutex);
    if (state_->last_question_ns > since_ns) return std::nullopt;
    message.incarnation = state_->health.incarnation();
    message.number = state_->last_question + 1;
  }
  if (Publish(message).has_value()) return std::nullopt;
  return message.number;
}

void FailureNotice::SetLog(std::shared_ptr<const CollectiveLog> log) {
  MutexLock lock(state_->mutex);
  state_->log = std::move(log);
}

// Appends `message` to the log and wakes all ranks. Returns nullopt when the message is published,
// or an earlier message of another rank that makes it superfluous.
// compareSet gives an empty entry to one author. An author may have died before it woke the ranks;
// the next author wakes them for that entry as well.
std::optional<NoticeMessage> FailureNotice::Publish(const NoticeMessage& message) {
  const std::string text = message.Serialize();
  int64_t entry = 0;
  {
    MutexLock lock(state_->mutex);
    entry = state_->next_entry;
  }
  const int64_t first = entry;
  for (;; ++entry) {
    const std::string found = store_->compareSet(EntryKey(entry), std::string(), text);
    if (found == text) break;
    const std::optional<NoticeMessage> other = NoticeMessage::Parse(found);
    if (!other.has_value() || other->kind != message.kind) continue;
    // All ranks read that entry already. Thousands of ranks that fail together make one entry.
    const bool same =
        message.kind == NoticeMessage::Kind::kFailure
            ? other->incarnation >= message.incarnation
            : message.kind == NoticeMessage::Kind::kWhere && other->number >= message.number;
    if (same) return other;
  }
  std::vector<std::string> keys;
  for (int64_t missed = first; missed <= entry; ++missed) {
    for (int rank = 0; rank < size_; ++rank) keys.push_back(WakeKey(rank, missed));
  }
  SetAll(*store_, keys);
  return std::nullopt;
}

void FailureNotice::EndMeeting(c10d::Store& store) {
  std::string meeting;
  {
    MutexLock lock(state_->mutex);
    meeting = state_->meeting;
  }
  if (!meeting.empty()) store.compareSet(meeting, std::string(), std::string(kFailedVerdict));
}

FailureNotice::EndMeetingOnFailure::EndMeetingOnFailure(FailureNotice& notice,
                                                        const std::string& verdict_key)
    : notice_(notice) {
  {
    MutexLock lock(notice_.state_->mutex);
    notice_.state_->meeting = verdict_key;
  }
  if (notice_.failed()) notice_.EndMeeting(*notice_.store_);
}

FailureNotice::EndMeetingOnFailure::~EndMeetingOnFailure() {
  MutexLock lock(notice_.state_->mutex);
  notice_.state_->meeting.clear();
}

bool FailureNotice::failed() const { return state_->failed; }

bool FailureNotice::MarkRaised() {
  MutexLock lock(state_->mutex);
  return state_->health.Raise();
}

GroupError FailureNotice::OnOperationFailed(const std::string& what, const std::string& reason) {
  MutexLock lock(state_->mutex);
  return state_->health.OnOperationFailed(what, reason);
}

GroupError FailureNotice::OnOwnError(GroupError::Kind kind, std::string message) {
  MutexLock lock(state_->mutex);
  return state_->health.OnOwnError(kind, std::move(message));
}

std::optional<GroupError> FailureNotice::OnUse(bool retired, const std::string& what) {
  MutexLock lock(state_->mutex);
  return state_->health.OnUse(retired, what);
}

GroupError FailureNotice::OnWaitEnded(const std::string& what) {
  MutexLock lock(state_->mutex);
  return state_->health.OnWaitEnded(what);
}

GroupHealth::Forward FailureNotice::OnForward(std::optional<GroupError>* error) {
  MutexLock lock(state_->mutex);
  return state_->health.OnForward(error);
}

std::optional<GroupError> FailureNotice::GoneError() const {
  MutexLock lock(state_->mutex);
  return state_->health.GoneError();
}

void FailureNotice::Throw(const GroupError& error) {
  if (error.is_cause) Report(error.message);
  switch (error.kind) {
    case GroupError::Kind::kPeerFailed:
      throw PeerFailedError(error.peer, error.message);
    case GroupError::Kind::kReduction:
      throw ReductionError(error.message);
    case GroupError::Kind::kCommunication:
      break;
  }
  throw CommunicationError(error.message);
}

int64_t FailureNotice::incarnation() const {
  MutexLock lock(state_->mutex);
  return state_->health.incarnation();
}

void FailureNotice::Begin(int64_t incarnation) {
  MutexLock lock(state_->mutex);
  state_->log.reset();
  state_->health.Begin(incarnation);
  state_->failed = state_->health.failed();
}

void FailureNotice::SetGone(Failure failure) {
  MutexLock lock(state_->mutex);
  state_->health.OnGone(std::move(failure));
}

std::optional<FailureNotice::Failure> FailureNotice::failure() const {
  MutexLock lock(state_->mutex);
  return state_->health.failure();
}

std::optional<FailureNotice::Failure> FailureNotice::AwaitFailure(absl::Duration timeout) const {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(state_->mutex);
  while (!state_->health.failed()) {
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) break;
    state_->changed.WaitFor(state_->mutex, left);
  }
  return state_->health.failure();
}

void FailureNotice::YieldToCause(absl::Duration head_start) const {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + head_start;
  MutexLock lock(state_->mutex);
  for (absl::Duration left = head_start; left > absl::ZeroDuration();
       left = deadline - clock.Now()) {
    state_->changed.WaitFor(state_->mutex, left);
  }
}

FailureNotice::WaitResult FailureNotice::Wait(c10::ivalue::Future& future,
                                              absl::Duration timeout) const {
  if (future.completed()) return WaitResult::kCompleted;
  // The callback of a complete future runs at once on this thread, so no completion is missed.
  future.addCallback([state = state_](c10::ivalue::Future&) {
    MutexLock lock(state->mutex);
    state->changed.NotifyAll();
  });
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(state_->mutex);
  while (true) {
    if (future.completed()) return WaitResult::kCompleted;
    if (state_->health.failed()) return WaitResult::kPeerFailed;
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) return WaitResult::kTimedOut;
    state_->changed.WaitFor(state_->mutex, left);
  }
}

bool FailureNotice::AwaitCompletion(c10::ivalue::Future& future, absl::Duration timeout) const {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(state_->mutex);
  for (absl::Duration left = timeout; !future.completed() && left > absl::ZeroDuration();
       left = deadline - clock.Now()) {
    state_->changed.WaitFor(state_->mutex, left);
  }
  return future.completed();
}

void FailureNotice::WatchStore(c10d::Store& store) {
  bool lost = false;
  while (true) {
    int64_t entry = 0;
    {
      MutexLock lock(state_->mutex);
      if (state_->stopping) return;
      entry = state_->next_entry;
    }
    const int64_t start_ns = MonotonicNanoseconds();
    try {
      store.wait({WakeKey(rank_, entry)}, kWatchSlice);
      if (!TakeInNews(store)) return;
      lost = false;
    } catch (const std::exception& error) {
      const absl::Duration waited = absl::Nanoseconds(MonotonicNanoseconds() - start_ns);
      MutexLock lock(state_->mutex);
      if (state_->stopping) return;
      if (waited >= absl::FromChrono(kWatchSlice)) continue;  // the slice is over
      // Losing the store does not stop training: collectives still have their timeouts.
      LOG_IF(WARNING, !lost) << "rank " << rank_ << ": no news of failing peers until the store "
                             << "answers again: " << error.what();
      lost = true;
      const MonotonicClock clock;
      const absl::Time next = clock.Now() + kRetryInterval;
      while (!state_->stopping && clock.Now() < next) {
        state_->changed.WaitFor(state_->mutex, next - clock.Now());
      }
      if (state_->stopping) return;
    }
  }
}

// Reads all new entries of the log. Returns false when there was none: the destructor woke the
// thread.
bool FailureNotice::TakeInNews(c10d::Store& store) {
  bool any = false;
  while (true) {
    int64_t entry = 0;
    {
      MutexLock lock(state_->mutex);
      entry = state_->next_entry;
    }
    if (!store.check({EntryKey(entry)})) return any;
    const std::optional<NoticeMessage> message =
        NoticeMessage::Parse(store.get_to_str(EntryKey(entry)));
    if (message.has_value()) HandleMessage(store, *message);
    store.deleteKey(WakeKey(rank_, entry));
    MutexLock lock(state_->mutex);
    ++state_->next_entry;
    any = true;
  }
}

void FailureNotice::HandleMessage(c10d::Store& store, const NoticeMessage& message) {
  if (message.kind == NoticeMessage::Kind::kPing) {
    const bool asked =
        std::find(message.ranks.begin(), message.ranks.end(), rank_) != message.ranks.end();
    if (asked) store.set(AliveKey(message.incarnation, message.number, rank_), std::string("1"));
    return;
  }
  if (message.kind == NoticeMessage::Kind::kWhere) return AnswerWhere(store, message);
  {
    MutexLock lock(state_->mutex);
    const Failure failure{.rank = message.rank, .reason = message.reason};
    if (!state_->health.OnFailure(message.incarnation, failure)) return;
    state_->failed = true;
    state_->changed.NotifyAll();
  }
  EndMeeting(store);
}

void FailureNotice::AnswerWhere(c10d::Store& store, const NoticeMessage& message) {
  std::shared_ptr<const CollectiveLog> log;
  const std::string key = PositionKey(message.incarnation, message.number, rank_);
  std::string previous;
  {
    MutexLock lock(state_->mutex);
    state_->last_question = std::max(state_->last_question, message.number);
    state_->last_question_ns = MonotonicNanoseconds();
    if (state_->left) return;
    // A rank in another incarnation than the asker answers too: alive, without collectives.
    if (message.incarnation == state_->health.incarnation()) log = state_->log;
    previous = std::exchange(state_->last_position, key);
  }
  store.set(key, (log ? log->Position() : RankPosition()).Serialize());
  if (!previous.empty()) store.deleteKey(previous);
}

}  // namespace ddp::internal
