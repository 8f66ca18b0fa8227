#include "ddp/comm/host_group/host_group.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/blocked_signals.h"
#include "base/clock.h"
#include "base/process/cpu_quota.h"

namespace ddp::internal {
namespace {

// The longest sleep of a wait: `stop()` and, where the kernel has no futex_waitv, a death of a peer
// are looked at this often.
constexpr absl::Duration kLook = absl::Milliseconds(20);
constexpr absl::Duration kLookForDeath = absl::Microseconds(500);

constexpr absl::Duration kLongestNap = absl::Seconds(60);

constexpr uint32_t kEndKindMask = 0xff;

}  // namespace

absl::StatusOr<std::shared_ptr<HostGroup>> HostGroup::Make(
    int member, std::shared_ptr<const Segment> segment,
    std::vector<std::shared_ptr<const PeerArena>> arenas) {
  auto group =
      std::shared_ptr<HostGroup>(new HostGroup(member, std::move(segment), std::move(arenas)));
  std::promise<int> locked;
  std::future<int> result = locked.get_future();
  group->thread_ = std::thread(&HostGroup::HoldPlace, group.get(), std::move(locked));
  if (result.get() == 0) return group;
  return absl::FailedPreconditionError(
      absl::StrCat("its place is taken: two processes are rank ", member, " of the host"));
}

HostGroup::HostGroup(int member, std::shared_ptr<const Segment> segment,
                     std::vector<std::shared_ptr<const PeerArena>> arenas)
    : member_(member),
      size_(segment->size()),
      process_(::getpid()),
      segment_(std::move(segment)),
      arenas_(std::move(arenas)) {}

void HostGroup::Begin() {
  MeasureCores();
  begun_.store(true, std::memory_order_release);
  begun_.notify_all();
}

HostGroup::~HostGroup() { Leave(); }

void HostGroup::Leave() {
  if (!thread_.joinable()) return;
  if (in_forked_child()) return thread_.detach();  // the child does not have it
  stop_thread_.store(true, std::memory_order_release);
  begun_.store(true, std::memory_order_release);
  begun_.notify_all();
  Kick();
  thread_.join();
}

bool HostGroup::in_forked_child() const { return ::getpid() != process_; }

std::byte* HostGroup::InArena(int member, uint64_t offset, uint64_t bytes) const {
  return arenas_[member]->At(offset, bytes);
}

// ---- The end.

HostGroup::End HostGroup::end() const {
  const uint32_t word = segment_->header().end.load(std::memory_order_acquire);
  return {.kind = static_cast<GroupEnd>(word & kEndKindMask),
          .member = static_cast<int>(word >> 8)};
}

void HostGroup::SetEnd(GroupEnd kind, int member) {
  uint32_t none = 0;
  const uint32_t end = static_cast<uint32_t>(kind) | static_cast<uint32_t>(member) << 8;
  segment_->header().end.compare_exchange_strong(none, end, std::memory_order_seq_cst);
  segment_->RingAll();
}

void HostGroup::Abort() {
  if (!in_forked_child()) SetEnd(GroupEnd::kAborted, member_);
}

void HostGroup::TellOfDeath(void* group) {
  auto* const self = static_cast<HostGroup*>(group);
  if (!self->has_left(self->member_)) self->SetEnd(GroupEnd::kDied, self->member_);
}

bool HostGroup::NoticeEnds() {
  if (ended()) return true;
  for (int member = 0; member < size_; ++member) {
    if (member != member_ && segment_->has_died(member)) {
      SetEnd(GroupEnd::kDied, member);
      return true;
    }
  }
  return false;
}

bool HostGroup::BeginTouch() {
  segment_->row(member_).touching.fetch_add(1, std::memory_order_seq_cst);
  if (segment_->header().end.load(std::memory_order_seq_cst) == 0) return true;
  EndTouch();
  return false;
}

void HostGroup::EndTouch() {
  segment_->row(member_).touching.fetch_sub(1, std::memory_order_release);
}

bool HostGroup::Quiesce(absl::Duration timeout) const {
  const int64_t until = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(timeout);
  for (int member = 0; member < size_; ++member) {
    MemberRow& row = segment_->row(member);
    if (member == member_) continue;
    while (row.touching.load(std::memory_order_seq_cst) != 0 && !segment_->has_died(member)) {
      if (MonotonicNanoseconds() > until) return false;
      ::sched_yield();
    }
  }
  return true;
}

std::function<bool()> HostGroup::GoneTest(int member) const {
  return [segment = segment_, arena = arenas_[member], member] {
    return segment->has_left(member) || segment->has_died(member);
  };
}

// ---- Waiting.

void HostGroup::Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void HostGroup::WakeSleepers(int member) const {
  MemberRow& row = segment_->row(member);
  if (row.sleepers.load(std::memory_order_seq_cst) == 0) return;
  row.bell.fetch_add(1, std::memory_order_seq_cst);
  FutexWake(row.bell);
}

void HostGroup::WakeAll() const {
  for (int member = 0; member < size_; ++member) WakeSleepers(member);
}

void HostGroup::Notify(int member) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  WakeSleepers(member);
}

bool HostGroup::Sleep(absl::FunctionRef<bool()> done, absl::FunctionRef<bool()> stop,
                      int64_t deadline_ns) {
  while (true) {
    const int64_t left_ns = deadline_ns - MonotonicNanoseconds();
    bool over = left_ns <= 0;
    const auto look = [&] { return over = done() || NoticeEnds() || stop() || over; };
    Doze(look, std::min(kLook, absl::Nanoseconds(left_ns)));
    if (over) return done();
  }
}

void HostGroup::Doze(absl::FunctionRef<bool()> stop, absl::Duration timeout) const {
  MemberRow& row = segment_->row(member_);
  row.sleepers.fetch_add(1, std::memory_order_seq_cst);
  // Pairs with the fence in Notify(): either the notifier sees the sleeper, or stop() sees the
  // notifier's word. Without the fence, a load of stop() could come before the addition.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint32_t bell = row.bell.load(std::memory_order_seq_cst);
  if (!stop()) FutexWait(row.bell, bell, timeout);
  row.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// Decides how long to spin, from the cores of all members.
void HostGroup::MeasureCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int member = 0; member < size_; ++member) {
    CPU_OR(&cores, &cores, &segment_->row(member).cores);
  }
  const double usable = std::min(static_cast<double>(CPU_COUNT(&cores)), CpuQuota());
  spins_.store(usable >= size_ ? kLongSpin : kShortSpin, std::memory_order_relaxed);
  cores_to_spare_.store(usable >= size_ + 1, std::memory_order_relaxed);
}

// ---- The thread.

void HostGroup::SetBackground(Background background) {
  {
    MutexLock lock(background_mutex_);
    background_ = std::move(background);
  }
  Kick();
}

void HostGroup::SetOnEnd(std::function<void()> on_end) {
  {
    MutexLock lock(background_mutex_);
    on_end_ = std::move(on_end);
  }
  Kick();
}

void HostGroup::Kick() {
  std::atomic<uint32_t>& bell = segment_->row(member_).bell;
  bell.fetch_add(1, std::memory_order_seq_cst);
  FutexWake(bell);
}

// The thread. `locked` gets pthread_mutex_trylock()'s result.
void HostGroup::HoldPlace(std::promise<int> locked) {
  ::pthread_setname_np(::pthread_self(), "ddp-peers");
  const BlockedSignals blocked;
  MemberRow& row = segment_->row(member_);
  const int result = ::pthread_mutex_trylock(&row.life);
  if (result == 0) {
    row.state.store(static_cast<uint32_t>(MemberState::kJoined), std::memory_order_seq_cst);
  }
  locked.set_value(result);
  if (result != 0) return;
  begun_.wait(false, std::memory_order_acquire);
  Serve();
  row.state.store(static_cast<uint32_t>(MemberState::kLeft), std::memory_order_seq_cst);
  ::pthread_mutex_unlock(&row.life);
  segment_->RingAll();
}

void HostGroup::Serve() {
  MemberRow& row = segment_->row(member_);
  bool counted = false;  // among the sleepers, whom a notification wakes
  std::vector<FutexWord> words;
  // An exception would end the process without a word to the peers.
  const auto end_by = [this](const std::exception& error) {
    LOG(ERROR) << "a group in shared memory ends, because its thread in member " << member_
               << " caught: " << error.what();
    SetEnd(GroupEnd::kAborted, member_);
  };
  while (true) {
    // The bell is read before every word whose change rings it, stop_thread_ too: a ring after this
    // line ends the sleep below.
    const uint32_t bell = row.bell.load(std::memory_order_seq_cst);
    if (stop_thread_.load(std::memory_order_acquire)) break;
    Nap nap;
    try {
      MutexLock lock(background_mutex_);
      if (background_) nap = background_();
    } catch (const std::exception& error) {
      end_by(error);
    }
    if (nap.wake_on_notify != counted) {
      counted = nap.wake_on_notify;
      row.sleepers.fetch_add(counted ? 1 : -1, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);  // as in Doze()
      if (counted) continue;  // a notification before this line has woken nobody
    }
    words.assign(1, {.word = &row.bell, .expected = bell});
    WatchPeers(words);
    if (ended()) {
      try {
        MutexLock lock(background_mutex_);
        if (on_end_) std::exchange(on_end_, nullptr)();
      } catch (const std::exception& error) {
        end_by(error);
      }
    }
    SleepOn(words, nap);
  }
  if (counted) row.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// Adds the words by which the kernel marks the ends of the peers. Ends the group when one has died.
void HostGroup::WatchPeers(std::vector<FutexWord>& words) {
  if (NoticeEnds()) return;
  for (int member = 0; member < size_; ++member) {
    if (member == member_) continue;
    // The kernel wakes a waiter only when the word says that there is one.
    std::atomic<uint32_t>& life = Segment::LifeWord(segment_->row(member));
    uint32_t word = life.load(std::memory_order_acquire);
    while ((word & FUTEX_TID_MASK) != 0 && (word & FUTEX_WAITERS) == 0 &&
           !life.compare_exchange_weak(word, word | FUTEX_WAITERS, std::memory_order_acq_rel)) {
    }
    if ((word & FUTEX_OWNER_DIED) != 0) {  // since NoticeEnds(): the kernel wakes nobody now
      return SetEnd(GroupEnd::kDied, member);
    }
    if ((word & FUTEX_TID_MASK) == 0) continue;  // has left
    words.push_back({.word = &life, .expected = word | FUTEX_WAITERS});
  }
}

void HostGroup::SleepOn(const std::vector<FutexWord>& words, const Nap& nap) const {
  // The words beyond the kernel's limit are looked at now and then.
  const bool all = words.size() <= kMaxFutexWords;
  const absl::Duration longest = std::min(nap.longest, all ? kLongestNap : kLook);
  if (FutexWaitAny(words, longest)) return;
  LOG_FIRST_N(INFO, 1)
      << "the kernel has no futex_waitv (Linux 5.16): the deaths of other ranks are "
         "looked for, twice in a millisecond while this rank waits";
  const bool waits = segment_->row(member_).sleepers.load(std::memory_order_relaxed) != 0;
  FutexWait(*words.front().word, words.front().expected,
            std::min(longest, waits ? kLookForDeath : kLook));
}

}  // namespace ddp::internal
