#ifndef DDP_COMM_HOST_GROUP_HOST_GROUP_H_
#define DDP_COMM_HOST_GROUP_HOST_GROUP_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/death_notice.h"
#include "base/mutex.h"
#include "ddp/comm/arena/peer_arena.h"
#include "ddp/comm/host_group/futex.h"
#include "ddp/comm/host_group/segment.h"

namespace ddp::internal {

// The ranks of one host that share memory, as one of them sees them: the segment, the arenas of all
// members, who lives, and how to wait for the others. Members have numbers from 0. GroupEntry makes
// a group. Free of LibTorch.
//
// End. A group ends when a member dies, or calls Abort(). The end is final and reaches every member
// within microseconds: all waits return. A member that leaves in order (its destructor) does not
// end the group, and wakes the waits of the others.
//
// Death. One thread of each member ("ddp-peers") holds the robust mutex of the member's row as long
// as the member lives. When the process is killed, the kernel marks the mutex before it frees the
// process's memory. Peers that wait read the mark; the thread of a peer sleeps on it, and ends the
// group for all others. (Linux, Documentation/locking/robust-futex-ABI.) A process that dumps core
// is marked after the dump, so the handler of its fatal signal ends the group
// (base/death_notice.h).
//
// Waiting. A wait spins, and then sleeps. It spins long when the members have a core each.
//
// Fork. A forked child has no thread of the group, and must not use the group. Its destructors
// leave the group as it is.
//
// Thread-safe, apart from Begin() and Leave(). The background function and the function for the end
// run on "ddp-peers".
class HostGroup {
 public:
  // A function that the thread calls when it wakes. It returns how long the thread may sleep at
  // most, and whether a Notify() of a peer must wake it. It must not block.
  struct Nap {
    absl::Duration longest = absl::InfiniteDuration();
    bool wake_on_notify = false;
  };
  using Background = std::function<Nap()>;

  // Takes the place of `member`. kFailedPrecondition: another process has it.
  static absl::StatusOr<std::shared_ptr<HostGroup>> Make(
      int member, std::shared_ptr<const Segment> segment,
      std::vector<std::shared_ptr<const PeerArena>> arenas);

  // To be called once, when all members have taken their places.
  void Begin();

  // Leaves.
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  // Leaves in order, and ends the thread. The other members keep what this member has published,
  // and the memory stays mapped. Later calls do nothing.
  void Leave();

  // Returns true on the group's own thread, where Leave() must not be called.
  bool OnThread() const { return std::this_thread::get_id() == thread_.get_id(); }

  int member() const { return member_; }
  int size() const { return size_; }
  const Segment& segment() const { return *segment_; }
  bool in_forked_child() const;

  // Returns the address in this process of `bytes` at `offset` of a member's arena. Null when they
  // are not inside that arena.
  std::byte* InArena(int member, uint64_t offset, uint64_t bytes) const;

  // Returns the end of the group, and the member that died or aborted.
  struct End {
    GroupEnd kind = GroupEnd::kNone;
    int member = -1;
  };
  End end() const;
  bool ended() const { return segment_->header().end.load(std::memory_order_acquire) != 0; }
  // Returns true when a member has left in order. What it published before stays.
  bool has_left(int member) const { return segment_->has_left(member); }

  // Ends the group for all members. Operations of others fail. Never blocks. A forked child ends
  // nothing.
  void Abort();

  // Waits until no other living member writes into this member's memory. To be called after the
  // end. Returns false when a member was still writing (it is stopped) after `timeout`.
  bool Quiesce(absl::Duration timeout) const;

  // Mark that this member is about to write into memory of others, and that it has done so. Between
  // them come no waits. BeginTouch() returns false, and marks nothing, when the group has ended.
  bool BeginTouch();
  void EndTouch();

  // Returns a function that is true when `member` has left or has died. The function may be called
  // after the destruction of the group. It keeps the memory mapped.
  std::function<bool()> GoneTest(int member) const;

  // Numbers what all members make in the same order: 0, 1, 2 and so on.
  uint64_t NextNumber() { return next_number_++; }

  // Wakes the sleeping threads of a member, because words of this member have changed. Call it
  // after the store.
  void Notify(int member);
  // Does so for all members when `all()` says that the words of all have changed, for which the
  // sleepers wait. Of the members that call it, the last one sees the words of all. So one member
  // wakes the others, each once.
  template <typename All>
  void NotifyIf(const All& all) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (all()) WakeAll();
  }
  // Wakes the sleeping threads of this member. The last change before the call must be a
  // read-modify-write operation, with memory_order_seq_cst, of a word that the sleepers' `done`
  // reads: it takes the place of the fence in Notify().
  void NotifyOwn() { WakeSleepers(member_); }

  // Blocks until `done()`, the end of the group, `stop()` or the deadline, in this order. Returns
  // done(). `done` and `stop` are short, and read words of the segment or atomics of this process.
  // A change of `stop()` alone may be noticed 20 ms later.
  template <typename Done, typename Stop>
  bool Wait(const Done& done, const Stop& stop, int64_t deadline_ns) {
    if (Spin(done, stop)) return true;
    return Sleep(done, stop, deadline_ns);
  }

  // Blocks until `stop()`, a notification, Kick() or `timeout`, also after the end of the group.
  // May return early. `stop` is as `done` in Wait().
  void Doze(absl::FunctionRef<bool()> stop, absl::Duration timeout) const;

  // Sets the background function, and calls it soon. Null: none from the return on.
  void SetBackground(Background background);
  // Sets a function that the thread calls once when the group has ended; soon, when that was
  // before. It must not block. Null: none from the return on.
  void SetOnEnd(std::function<void()> on_end);
  // Wakes the thread, so that it calls the background function.
  void Kick();

  // True when each member can have a core of its own, and one is left over.
  bool cores_to_spare() const { return cores_to_spare_.load(std::memory_order_relaxed); }

 private:
  static constexpr int kShortSpin = 200;
  static constexpr int kLongSpin = 20'000;

  static void Pause();
  template <typename Done, typename Stop>
  bool Spin(const Done& done, const Stop& stop) {
    const int spins = spins_.load(std::memory_order_relaxed);
    for (int i = 0; i < spins; ++i) {
      if (done()) return true;
      if (i % 64 == 63 && (NoticeEnds() || stop())) return done();
      Pause();
    }
    return done();
  }
  bool Sleep(absl::FunctionRef<bool()> done, absl::FunctionRef<bool()> stop, int64_t deadline_ns);

  HostGroup(int member, std::shared_ptr<const Segment> segment,
            std::vector<std::shared_ptr<const PeerArena>> arenas);
  void SetEnd(GroupEnd kind, int member);
  // Ends the group in the handler of a signal that ends this process.
  static void TellOfDeath(void* group);
  // Wakes the sleepers of a member. The caller has ordered its stores before.
  void WakeSleepers(int member) const;
  void WakeAll() const;
  // Reads the marks of the kernel. Returns true when the group has ended.
  bool NoticeEnds();
  void MeasureCores();
  void HoldPlace(std::promise<int> locked);
  void Serve();
  void WatchPeers(std::vector<FutexWord>& words);
  void SleepOn(const std::vector<FutexWord>& words, const Nap& nap) const;

  const int member_;
  const int size_;
  const pid_t process_;
  const std::shared_ptr<const Segment> segment_;
  const std::vector<std::shared_ptr<const PeerArena>> arenas_;  // by member
  std::atomic<int> spins_ = kShortSpin;
  std::atomic<bool> cores_to_spare_ = false;

  uint64_t next_number_ = 0;

  std::atomic<bool> begun_ = false;
  std::atomic<bool> stop_thread_ = false;
  Mutex background_mutex_;
  Background background_ ABSL_GUARDED_BY(background_mutex_);
  std::function<void()> on_end_ ABSL_GUARDED_BY(background_mutex_);
  std::thread thread_;
  const DeathNotice death_notice_{&TellOfDeath, this};
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_HOST_GROUP_H_
