// Length: four small models of one protocol, each with its seeded defects.

// Models of the ways in which HostGroup sleeps, wakes, ends and waits for silence, of which every
// interleaving is visited.
//
// The models have no time limits. So a wake-up that is lost shows as a state in which all wait.
//
// Memory order. A plain store is a store with release: it stays in a buffer of its thread for as
// long as the model likes, and other threads see the old value. Read-modify-write operations and
// fences wait until the buffer is empty. Loads come in the order of the program, as on x86. On
// other machines the fence after the addition to `sleepers` keeps the loads of done() behind it:
// kCheckBeforeCount shows why it must.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "testing/shared_memory/state_explorer.h"

namespace ddp::internal {
namespace {

constexpr int kMost = 3;

// ---- HostGroup::Sleep(), Notify() and NotifyIf(): members that meet in barriers.

enum class Notifier : uint8_t {
  kEach,     // Notify(): each member
  kLast,     // NotifyIf() after a store: a member that sees the words of all
  kCounter,  // NotifyIf() after an addition to one word of all members
};

enum class SleepDefect : uint8_t {
  kNone,
  kNoFenceInNotify,
  kNotifyBeforeStore,
  kNoRing,               // a notifier wakes, and leaves the bell as it is
  kCheckBeforeCount,     // done() is read before the sleeper is counted
  kBellAfterCheck,       // the bell is read after done()
  kSleepWithoutCompare,  // a futex that does not look at the bell
};

struct SleepState {
  struct Member {
    uint8_t at = 0;
    uint8_t round = 0;   // that the member is in
    uint8_t stored = 0;  // its signals; `word` is what the others see
    uint8_t word = 0;
    uint8_t to = 0;  // whom it notifies
    uint8_t sleepers = 0;
    uint8_t bell = 0;
    uint8_t heard = 0;  // the bell, as read
    uint8_t done = 0;   // as read
    uint8_t blocked = 0;
  };
  Member members[kMost];
};

class SleepModel {
 public:
  SleepModel(int size, int rounds, Notifier notifier, SleepDefect defect)
      : size_(size), rounds_(static_cast<uint8_t>(rounds)), notifier_(notifier), defect_(defect) {}

  template <typename Emit>
  std::string Next(const SleepState& state, const Emit& emit) const {
    for (int member = 0; member < size_; ++member) {
      if (state.members[member].word != state.members[member].stored) {
        SleepState next = state;
        next.members[member].word = next.members[member].stored;
        emit(next);
      }
      SleepState next = state;
      if (Advance(next, member)) emit(next);
    }
    return "";
  }

  bool IsEnd(const SleepState& state) const {
    return std::all_of(state.members, state.members + size_,
                       [this](const auto& member) { return member.round == rounds_; });
  }

 private:
  enum At : uint8_t { kStore, kFence, kLook, kRing, kWake, kCount, kBell, kCheck, kBlock, kLeave };

  // The order of the steps of a sleeper.
  At First() const { return defect_ == SleepDefect::kCheckBeforeCount ? kCheck : kCount; }
  At AfterCount() const {
    if (defect_ == SleepDefect::kBellAfterCheck) return kCheck;
    return kBell;
  }
  At AfterBell() const {
    const bool checked =
        defect_ == SleepDefect::kCheckBeforeCount || defect_ == SleepDefect::kBellAfterCheck;
    return checked ? kBlock : kCheck;
  }
  At AfterCheck() const {
    if (defect_ == SleepDefect::kCheckBeforeCount) return kCount;
    return defect_ == SleepDefect::kBellAfterCheck ? kBell : kBlock;
  }

  // Returns true when a member sees that all have given the signal of its round.
  bool SeesAll(const SleepState& state, const SleepState::Member& me, int round) const {
    return std::all_of(state.members, state.members + size_, [&](const auto& other) {
      return (&other == &me ? other.stored : other.word) > round;
    });
  }

  // One step of a member. False: the member waits.
  bool Advance(SleepState& state, int number) const {
    SleepState::Member& me = state.members[number];
    SleepState::Member& to = state.members[me.to];
    const bool flushed = me.word == me.stored;
    switch (me.at) {
      case kStore:
        if (me.round == rounds_) return false;
        if (defect_ != SleepDefect::kNotifyBeforeStore) ++me.stored;
        if (notifier_ == Notifier::kCounter) me.word = me.stored;
        me.to = 0;
        me.at = kFence;
        return true;
      case kFence:
        if (!flushed && defect_ != SleepDefect::kNoFenceInNotify) return false;
        me.at = kLook;
        if (notifier_ != Notifier::kEach && !SeesAll(state, me, me.round)) me.to = size_;
        return true;
      case kLook:
        if (me.to == size_) {
          if (defect_ == SleepDefect::kNotifyBeforeStore) ++me.stored;
          me.at = First();
        } else if (to.sleepers == 0) {
          ++me.to;
        } else {
          me.at = kRing;
        }
        return true;
      case kRing:
        if (!flushed) return false;
        if (defect_ != SleepDefect::kNoRing) ++to.bell;
        me.at = kWake;
        return true;
      case kWake:
        to.blocked = 0;
        ++me.to;
        me.at = kLook;
        return true;
      case kCount:
        if (!flushed) return false;
        ++me.sleepers;
        me.at = AfterCount();
        return true;
      case kBell:
        me.heard = me.bell;
        me.at = AfterBell();
        return true;
      case kCheck:
        me.done = SeesAll(state, me, me.round) ? 1 : 0;
        me.at = AfterCheck();
        return true;
      case kBlock:
        if (me.done == 0 && (me.bell == me.heard || defect_ == SleepDefect::kSleepWithoutCompare)) {
          me.blocked = 1;
        }
        me.at = kLeave;
        return true;
      case kLeave:
        if (me.blocked != 0 || !flushed) return false;
        --me.sleepers;
        if (me.done != 0) ++me.round;
        me.at = me.done != 0 ? kStore : First();
        me.done = me.heard = 0;
        return true;
      default:
        return false;
    }
  }

  const int size_;
  const uint8_t rounds_;
  const Notifier notifier_;
  const SleepDefect defect_;
};

TEST(WakeProtocolModelTest, NoSleeperMissesANotification) {
  for (const Notifier notifier : {Notifier::kEach, Notifier::kLast, Notifier::kCounter}) {
    for (const auto& [size, rounds] : {std::pair(2, 4), std::pair(3, 2)}) {
      const SleepModel model(size, rounds, notifier, SleepDefect::kNone);
      const Exploration found = Explore(model, SleepState{});
      EXPECT_EQ(found.violation, "");
      std::cout << size << " members, " << rounds << " rounds: " << found.states << " states\n";
    }
  }
}

TEST(WakeProtocolModelTest, TheSleepModelFindsEveryDefect) {
  for (int i = 1; i <= static_cast<int>(SleepDefect::kSleepWithoutCompare); ++i) {
    for (const Notifier notifier : {Notifier::kEach, Notifier::kLast, Notifier::kCounter}) {
      // An addition to the counter is a fence.
      const auto defect = static_cast<SleepDefect>(i);
      if (notifier == Notifier::kCounter && defect == SleepDefect::kNoFenceInNotify) continue;
      EXPECT_EQ(Explore(SleepModel(2, 2, notifier, defect), SleepState{}).violation,
                "all wait for ever")
          << i << " " << static_cast<int>(notifier);
    }
  }
}

// ---- HostGroup::RunThread() with CollectiveEngine::OnWake() and RunAll(): a member that starts
// two operations, waits for none, and leaves; its thread; and a peer that gives two signals.

enum class ThreadDefect : uint8_t {
  kNone,
  kStopBeforeBell,     // the thread looks at `stop` before it reads the bell
  kNoSecondLook,       // a thread that has just counted itself sleeps at once
  kAsleepAfterUnlock,  // `asleep` is set when the queue is free again
  kNoKick,
};

struct ThreadState {
  uint8_t main = 0, thread = 0, peer = 0;  // the next steps
  uint8_t started = 0, completed = 0;      // operations
  uint8_t stored = 0, word = 0;            // the peer's signals
  uint8_t sleepers = 0, bell = 0, heard = 0;
  uint8_t stop = 0, asleep = 1, was_asleep = 0;
  uint8_t counted = 0, wake = 0;
  uint8_t blocked = 0, timed = 0;
};

class ThreadModel {
 public:
  explicit ThreadModel(ThreadDefect defect) : defect_(defect) {}

  template <typename Emit>
  std::string Next(const ThreadState& state, const Emit& emit) const {
    if (state.word != state.stored) {
      ThreadState next = state;
      next.word = next.stored;
      emit(next);
    }
    ThreadState next = state;
    if (AdvanceMain(next)) emit(next);
    next = state;
    if (AdvancePeer(next)) emit(next);
    AdvanceThread(state, emit);
    return "";
  }

  bool IsEnd(const ThreadState& state) const { return state.main == kJoined; }

 private:
  enum Main : uint8_t {
    kStart,
    kExchange,
    kMaybeKick,
    kMaybeWake,
    kAwait,
    kStop,
    kKick,
    kWakeUp,
    kJoin,
    kJoined
  };
  enum Thread : uint8_t {
    kBell,
    kLookAtStop,
    kOnWake,
    kSetAsleep,
    kPoll,
    kCountSelf,
    kSleep,
    kBlocked,
    kEnded
  };
  enum Peer : uint8_t { kSignal, kFence, kLook, kRing, kWake };

  static bool Signalled(const ThreadState& state) { return state.word > state.completed; }

  bool AdvanceMain(ThreadState& state) const {
    switch (state.main) {
      case kStart:  // the lock of the queue, and RunAll()'s Poll()
        ++state.started;
        if (Signalled(state)) ++state.completed;
        state.main = state.completed == state.started ? kAwait : kExchange;
        return true;
      case kExchange:
        state.was_asleep = std::exchange(state.asleep, 0);
        state.main = state.was_asleep != 0 ? kMaybeKick : kAwait;
        return true;
      case kMaybeKick:
        if (defect_ != ThreadDefect::kNoKick) ++state.bell;
        state.main = kMaybeWake;
        return true;
      case kMaybeWake:
        if (defect_ != ThreadDefect::kNoKick) state.blocked = 0;
        state.main = kAwait;
        return true;
      case kAwait:
        if (state.completed != state.started) return false;
        state.main = state.started == 2 ? kStop : kStart;
        return true;
      case kStop:
        state.stop = 1;
        state.main = kKick;
        return true;
      case kKick:
        ++state.bell;
        state.main = kWakeUp;
        return true;
      case kWakeUp:
        state.blocked = 0;
        state.main = kJoin;
        return true;
      case kJoin:
        if (state.thread != kEnded) return false;
        state.main = kJoined;
        return true;
      default:
        return false;
    }
  }

  bool AdvancePeer(ThreadState& state) const {
    switch (state.peer) {
      case kSignal:
        if (state.stored == 2) return false;
        ++state.stored;
        state.peer = kFence;
        return true;
      case kFence:
        if (state.word != state.stored) return false;
        state.peer = kLook;
        return true;
      case kLook:
        state.peer = state.sleepers == 0 ? kSignal : kRing;
        return true;
      case kRing:
        ++state.bell;
        state.peer = kWake;
        return true;
      case kWake:
        state.blocked = 0;
        state.peer = kSignal;
        return true;
      default:
        return false;
    }
  }

  template <typename Emit>
  void AdvanceThread(const ThreadState& state, const Emit& emit) const {
    const bool stop_first = defect_ == ThreadDefect::kStopBeforeBell;
    ThreadState next = state;
    switch (state.thread) {
      case kBell:
        next.heard = next.bell;
        next.thread = stop_first ? kOnWake : kLookAtStop;
        return emit(next);
      case kLookAtStop:
        next.thread = stop_first ? kBell : kOnWake;
        if (next.stop != 0) next.thread = kEnded;
        return emit(next);
      case kOnWake: {
        const bool quiet = next.started == next.completed;
        next.wake = 0;
        next.timed = quiet ? 0 : 1;
        next.thread = kCountSelf;
        if (quiet && defect_ == ThreadDefect::kAsleepAfterUnlock) {
          next.thread = kSetAsleep;
        } else if (quiet) {
          next.asleep = 1;
        }
        emit(next);  // not in a hurry: a nap with a time limit, or a sleep
        if (quiet) return;
        next.thread = kPoll;
        return emit(next);
      }
      case kSetAsleep:
        next.asleep = 1;
        next.thread = kCountSelf;
        return emit(next);
      case kPoll:  // in a hurry, so a notification has to wake
        if (next.completed < next.started && Signalled(next)) ++next.completed;
        next.wake = next.completed < next.started ? 1 : 0;
        next.timed = next.wake == 0 ? 1 : 0;
        next.thread = kCountSelf;
        return emit(next);
      case kCountSelf: {
        const bool changed = next.wake != next.counted;
        next.counted = next.wake;
        next.sleepers = next.wake;
        const bool again = changed && next.wake != 0 && defect_ != ThreadDefect::kNoSecondLook;
        next.thread = again ? First() : kSleep;
        return emit(next);
      }
      case kSleep:
        next.blocked = next.bell == next.heard ? 1 : 0;
        next.thread = kBlocked;
        return emit(next);
      case kBlocked:
        if (next.blocked != 0 && next.timed == 0) return;
        next.blocked = 0;
        next.thread = First();
        return emit(next);
      default:
        return;
    }
  }

  Thread First() const { return defect_ == ThreadDefect::kStopBeforeBell ? kLookAtStop : kBell; }

  const ThreadDefect defect_;
};

TEST(WakeProtocolModelTest, TheThreadCompletesOperationsAndLeaves) {
  const Exploration found = Explore(ThreadModel(ThreadDefect::kNone), ThreadState{});
  EXPECT_EQ(found.violation, "");
  std::cout << found.states << " states\n";
}

TEST(WakeProtocolModelTest, TheThreadModelFindsEveryDefect) {
  for (int i = 1; i <= static_cast<int>(ThreadDefect::kNoKick); ++i) {
    const ThreadModel model(static_cast<ThreadDefect>(i));
    EXPECT_EQ(Explore(model, ThreadState{}).violation, "all wait for ever") << i;
  }
}

// ---- HostGroup::WatchPeers() and SetEnd(): members that may be killed at every step. The kernel
// marks the dead member's word, and wakes one thread that waits for it, if the word asks for it.

enum class DeathDefect : uint8_t {
  kNone,
  kNoSecondLook,  // a peer that has died since the first look is not watched, and not noticed
  kNoWaiters,     // the kernel is not asked to wake
  kNoRing,        // who notices tells nobody
};

struct DeathState {
  struct Member {
    uint8_t at = 0;
    uint8_t dead = 0, waiters = 0;  // the word of its mutex
    uint8_t bell = 0, heard = 0;
    uint8_t to = 0;
    uint8_t watched = 0;  // a bit for each member
    uint8_t blocked = 0;
  };
  uint8_t end = 0;
  uint8_t deaths = 0;
  Member members[kMost];
};

class DeathModel {
 public:
  DeathModel(int size, DeathDefect defect) : size_(size), defect_(defect) {}

  template <typename Emit>
  std::string Next(const DeathState& state, const Emit& emit) const {
    for (int number = 0; number < size_; ++number) {
      if (state.members[number].dead != 0) continue;
      if (state.deaths < size_ - 1) Kill(state, number, emit);
      DeathState next = state;
      if (Advance(next, number)) emit(next, true);
    }
    return "";
  }

  // Every survivor knows.
  bool IsEnd(const DeathState& state) const {
    return state.deaths == 0 ||
           std::all_of(state.members, state.members + size_,
                       [](const auto& member) { return member.dead != 0 || member.at == kKnows; });
  }

 private:
  enum At : uint8_t { kBell, kNotice, kWatch, kBlock, kBlocked, kRing, kKnows };

  template <typename Emit>
  void Kill(const DeathState& state, int number, const Emit& emit) const {
    DeathState next = state;
    DeathState::Member& victim = next.members[number];
    victim.dead = 1;
    victim.blocked = 0;
    ++next.deaths;
    bool woken = false;
    for (int other = 0; other < size_ && victim.waiters != 0; ++other) {
      const DeathState::Member& waiter = next.members[other];
      if (waiter.blocked == 0 || (waiter.watched & (1 << number)) == 0) continue;
      DeathState one = next;  // the kernel wakes any one of them
      one.members[other].blocked = 0;
      emit(one, false);
      woken = true;
    }
    if (!woken) emit(next, false);
  }

  bool Advance(DeathState& state, int number) const {
    DeathState::Member& me = state.members[number];
    switch (me.at) {
      case kBell:
        me.heard = me.bell;
        me.at = kNotice;
        return true;
      case kNotice: {
        const bool any = std::any_of(state.members, state.members + size_,
                                     [](const auto& member) { return member.dead != 0; });
        me.to = 0;
        me.watched = 0;
        me.at = state.end != 0 ? kKnows : any ? kRing : kWatch;
        if (me.at == kRing) state.end = 1;
        return true;
      }
      case kWatch: {
        if (me.to == size_) {
          me.at = kBlock;
          return true;
        }
        DeathState::Member& peer = state.members[me.to];
        if (peer.dead != 0 && defect_ != DeathDefect::kNoSecondLook) {
          state.end = 1;
          me.to = 0;
          me.at = kRing;
          return true;
        }
        if (me.to != number && peer.dead == 0) {
          if (defect_ != DeathDefect::kNoWaiters) peer.waiters = 1;
          me.watched |= static_cast<uint8_t>(1 << me.to);
        }
        ++me.to;
        return true;
      }
      case kBlock: {  // the kernel compares all words
        bool same = me.bell == me.heard;
        for (int peer = 0; peer < size_; ++peer) {
          if ((me.watched & (1 << peer)) != 0 && state.members[peer].dead != 0) same = false;
        }
        me.blocked = same ? 1 : 0;
        me.at = kBlocked;
        return true;
      }
      case kBlocked:
        if (me.blocked != 0) return false;
        me.at = kBell;
        return true;
      case kRing:  // one member after the other: who rings may die between two
        if (me.to == size_) {
          me.at = kKnows;
          return true;
        }
        if (defect_ != DeathDefect::kNoRing) {
          ++state.members[me.to].bell;
          state.members[me.to].blocked = 0;
        }
        ++me.to;
        return true;
      default:
        return false;
    }
  }

  const int size_;
  const DeathDefect defect_;
};

TEST(WakeProtocolModelTest, EverySurvivorNoticesADeath) {
  for (const int size : {2, 3}) {
    const Exploration found = Explore(DeathModel(size, DeathDefect::kNone), DeathState{});
    EXPECT_EQ(found.violation, "");
    std::cout << size << " members: " << found.states << " states\n";
  }
}

TEST(WakeProtocolModelTest, TheDeathModelFindsEveryDefect) {
  for (int i = 1; i <= static_cast<int>(DeathDefect::kNoRing); ++i) {
    const DeathModel model(3, static_cast<DeathDefect>(i));
    EXPECT_EQ(Explore(model, DeathState{}).violation, "all wait for ever") << i;
  }
}

// ---- BeginTouch(), EndTouch() and Quiesce(): member 0 owns memory into which the others write,
// and uses it again after the end of the group. Any member may end the group; the others may be
// killed.

enum class TouchDefect : uint8_t {
  kNone,
  kLookBeforeMark,  // a writer looks at the end, and then marks
  kNoLook,          // a writer does not look
  kNoQuiesce,       // the owner looks at the end only
  kQuiesceBeforeEnd,
};

struct TouchState {
  uint8_t end = 0;
  uint8_t owner = 0;
  uint8_t quiet = 0;  // how many members the owner has found silent
  uint8_t at[kMost] = {};
  uint8_t touching[kMost] = {};
  uint8_t writing[kMost] = {};
  uint8_t dead[kMost] = {};
};

class TouchModel {
 public:
  TouchModel(int size, TouchDefect defect) : size_(size), defect_(defect) {}

  template <typename Emit>
  std::string Next(const TouchState& state, const Emit& emit) const {
    TouchState next = state;
    const bool uses = state.owner == kUse;
    if (uses && std::count(state.writing, state.writing + size_, 0) != size_) {
      return "another member writes into memory that is used again";
    }
    AdvanceOwner(state, emit);
    for (int member = 1; member < size_; ++member) {
      if (state.dead[member] != 0) continue;
      next = state;
      if (AdvanceWriter(next, member)) emit(next);
      next = state;
      next.dead[member] = 1;  // the kernel marks when no thread of the process runs any more
      next.writing[member] = 0;
      emit(next, false);
    }
    return "";
  }

  bool IsEnd(const TouchState& state) const { return state.owner == kUse; }

 private:
  enum Owner : uint8_t { kOperate, kQuiesce, kEndLate, kUse };
  enum Writer : uint8_t { kMark, kLook, kWrite, kFinish, kUnmark, kUndo, kEndGroup, kOver };

  template <typename Emit>
  void AdvanceOwner(const TouchState& state, const Emit& emit) const {
    TouchState next = state;
    switch (state.owner) {
      case kOperate:
        if (defect_ != TouchDefect::kQuiesceBeforeEnd) next.end = 1;  // Abort()
        next.owner = defect_ == TouchDefect::kNoQuiesce ? kUse : kQuiesce;
        return emit(next);
      case kQuiesce:
        if (next.quiet == size_) {
          next.owner = defect_ == TouchDefect::kQuiesceBeforeEnd ? kEndLate : kUse;
        } else if (next.touching[next.quiet] == 0 || next.dead[next.quiet] != 0) {
          ++next.quiet;
        } else {
          return;
        }
        return emit(next);
      case kEndLate:
        next.end = 1;
        next.owner = kUse;
        return emit(next);
      default:
        return;
    }
  }

  // A writer writes piece after piece until the end, or ends the group itself.
  bool AdvanceWriter(TouchState& state, int member) const {
    uint8_t& at = state.at[member];
    const bool look_first = defect_ == TouchDefect::kLookBeforeMark;
    switch (at) {
      case kMark:
        if (look_first && state.end != 0) {
          at = kOver;
          return true;
        }
        at = look_first ? kWrite : kLook;
        if (!look_first) ++state.touching[member];
        return true;
      case kLook:
        at = state.end != 0 && defect_ != TouchDefect::kNoLook ? kUndo : kWrite;
        return true;
      case kWrite:
        if (look_first) ++state.touching[member];
        state.writing[member] = 1;
        at = kFinish;
        return true;
      case kFinish:
        state.writing[member] = 0;
        at = kUnmark;
        return true;
      case kUnmark:
        --state.touching[member];
        at = member == 2 ? kEndGroup : kMark;
        return true;
      case kUndo:
        --state.touching[member];
        at = kOver;
        return true;
      case kEndGroup:
        state.end = 1;
        at = kOver;
        return true;
      default:
        return false;
    }
  }

  const int size_;
  const TouchDefect defect_;
};

TEST(WakeProtocolModelTest, QuietMemoryIsWrittenByNobody) {
  for (const int size : {2, 3}) {
    const Exploration found = Explore(TouchModel(size, TouchDefect::kNone), TouchState{});
    EXPECT_EQ(found.violation, "");
    std::cout << size << " members: " << found.states << " states\n";
  }
}

TEST(WakeProtocolModelTest, TheTouchModelFindsEveryDefect) {
  for (int i = 1; i <= static_cast<int>(TouchDefect::kQuiesceBeforeEnd); ++i) {
    for (const int size : {2, 3}) {
      const TouchModel model(size, static_cast<TouchDefect>(i));
      EXPECT_NE(Explore(model, TouchState{}).violation, "") << i << ", " << size;
    }
  }
}

}  // namespace
}  // namespace ddp::internal
