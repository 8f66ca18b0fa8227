#ifndef DDP_COMM_SHARED_MEMORY_COLLECTIVE_ENGINE_H_
#define DDP_COMM_SHARED_MEMORY_COLLECTIVE_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/host_group/segment.h"
#include "ddp/comm/kernels/reduce.h"
#include "ddp/comm/shared_memory/mailboxes.h"

namespace ddp::internal {

// A collective as one member gives it to the engine. Memory is contiguous, and stays valid until
// the collective is complete.
struct CollectiveRequest {
  enum class Kind : uint8_t {
    kBarrier,
    kAllReduce,      // input 1, output 1: the same memory
    kBroadcast,      // input 1 on the root; output 1 elsewhere
    kAllGather,      // input 1; output for each member
    kReduceScatter,  // input for each member; output 1
    kAllToAll,       // input and output for each member; sizes may differ
    kAllGatherSized  // input 1, of any size; `on_sizes` gives the outputs
  };

  Kind kind = Kind::kBarrier;
  ReduceKind reduction = ReduceKind::kSum;
  ElementType type = ElementType::kUint8;
  int root = -1;
  // Of one part; equal on all members. 0: parts differ (kAllToAll, and kReduceScatter where all
  // members know the sizes).
  uint64_t elements = 0;
  std::optional<uint32_t> tag;  // see CollectiveEngine
  absl::InlinedVector<std::span<const std::byte>, 2> inputs;
  absl::InlinedVector<std::span<std::byte>, 2> outputs;
  // kAllGatherSized: called with the bytes of each member's input; returns as much memory for each.
  // Under the engine's lock.
  std::function<std::vector<std::span<std::byte>>(const std::vector<size_t>& sizes)> on_sizes;
};

// Returns what all ranks must have in common. The fields of a request that may differ are 0.
CollectiveKey KeyOf(const CollectiveRequest& request);

// Carries out the collectives and the messages of one member of a HostGroup. Free of LibTorch.
//
// Order. The n-th collective of one member meets the n-th of every other. Collectives complete in
// order. Messages are apart: see Mailboxes. Sums are taken in the order of ReduceTree() over the
// members: their bits depend on the inputs alone.
//
// Agreement. The members compare what KeyOf() returns. When they differ, a collective with a tag
// waits until it is given up: the caller finds out who differs. A collective without a tag fails on
// all members with kInvalidArgument.
//
// Progress. Whoever waits does the work, in Drive(), on the thread that waits. When no thread
// waits, the thread of the group does it: at once when the members have cores to spare, else 5 ms
// later. So there is no hand-over between threads when a collective is waited for at once.
//
// Errors of a collective: kUnavailable: a member has died or left. kAborted: a member has aborted.
// kDeadlineExceeded: its timeout has passed; the text names the members that had not come.
// kInvalidArgument: the members differ. kCancelled: the engine was destroyed, or another message
// was late. All but an engine's end abort the group. `done` gets an error when no other member can
// write into the operation's memory any more. A member that is stopped in a piece delays `done` by
// a second; then HostGroup::Quiesce() is still false, and the memory must not be used again.
//
// Thread-safe. `done` is called once for each operation, without a lock, on the thread that
// completes it.
class CollectiveEngine {
 public:
  using Done = Mailboxes::Done;

  // `group` outlives the engine.
  explicit CollectiveEngine(HostGroup* group);
  // Fails what is not complete. Blocks while another member writes into the memory of an operation,
  // at most a second.
  ~CollectiveEngine();
  CollectiveEngine(const CollectiveEngine&) = delete;
  CollectiveEngine& operator=(const CollectiveEngine&) = delete;

  // Start an operation and advance it as far as is possible without waiting.
  void Start(CollectiveRequest request, absl::Duration timeout, Done done);
  void Send(int to, uint64_t tag, std::span<const std::byte> data, absl::Duration timeout,
            Done done);
  void Receive(int from, uint64_t tag, std::span<std::byte> data, absl::Duration timeout,
               Done done);

  // An operation with a protocol of its own, outside of the order of collectives. Completes when
  // `advance` returns true. `advance` does what is possible without waiting; it is called under the
  // engine's lock. `may_advance` returns true when `advance` has something to do; it takes no lock,
  // and may still be called shortly after the end. Both are called on any thread, again and again.
  struct OwnProtocol {
    std::function<bool()> advance;
    std::function<bool()> may_advance;
  };
  void StartOwn(OwnProtocol protocol, absl::Duration timeout, Done done);

  // Advances operations on this thread until `stop()` or `deadline`. Returns stop(). `stop` is as
  // in HostGroup::Wait(); the completion of an operation wakes it.
  bool Drive(const std::function<bool()>& stop, absl::Time deadline);

  // Advances operations as far as is possible without waiting, and fails the hopeless ones.
  void Poll();

  // Makes the threads in Drive() call `stop()`.
  void Wake();

  // Fails what is not complete, and aborts the group when there is something. Every later operation
  // fails. Returns true when no other member can write into this member's memory any more; false
  // when one still might after a second.
  bool Abort();

 private:
  struct Operation;
  // A signal of all members that something waits for, in one word: its number, times 4. In the two
  // lower bits: 1 + the half whose headers the signal announces; or 0, and the number counts the
  // arrivals of all members, which announce nothing. 0 in all: nothing is awaited.
  using Awaited = uint64_t;
  using Finished = Mailboxes::Finished;

  // The functions OwnProtocol::may_advance of all own operations.
  using OwnLooks = absl::InlinedVector<std::function<bool()>, 2>;

  struct OwnOperation {
    OwnProtocol protocol;
    int64_t deadline_ns = 0;
    Done done;
  };

  template <typename Add>
  void Begin(const Add& add);
  // Calls `act(finished)` under the lock, and then what is finished.
  template <typename Act>
  void Locked(const Act& act);
  void Call(Finished&& finished);
  HostGroup::Nap OnWake();
  bool MayAdvance(const OwnLooks& own) const;

  // Advances everything as far as is possible without waiting.
  void Advance(Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdvanceCollectives(Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return queue_.empty() && mailboxes_.empty() && own_.empty();
  }
  // One step of the first collective. False: it has to wait for signals.
  bool Step(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enter(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Agree(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillRound(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DrainRound(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GatherSlices(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GoDirect(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishRound(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::byte* DataOf(int member, int half) const;
  void Fill(const Operation& operation, size_t offset, std::byte* buffer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Source>
  void Take(const Operation& operation, size_t offset, size_t limit, const Source& source);
  void ReduceInPlace(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const std::byte* DirectSource(const Operation& operation, int member, int part) const;

  Awaited Signal() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Awaited SignalHeader() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AllSignalled(Awaited awaited) const;
  int half() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return static_cast<int>(round_ & 1); }
  std::string Missing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EndStatus() const;
  void AdvanceOrFail(Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Break(const absl::Status& status, Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailAll(const absl::Status& status, Finished& finished)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  HostGroup* const group_;
  const int member_;
  const int size_;
  const int group_of_node_;  // see GroupOnNodes()

  std::atomic<uint64_t> epoch_{0};         // raised when operations have completed, and by Wake()
  std::atomic<bool> busy_{false};          // some operation is not complete
  std::atomic<uint64_t> awaited_{0};       // see MayAdvance()
  mutable std::atomic<uint64_t> seen_{0};  // a signal of headers that all members have given
  std::atomic<bool> exposed_{false};  // a failed operation's memory may still be written by others

  Mutex mutex_;
  std::deque<std::unique_ptr<Operation>> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<OwnOperation> own_ ABSL_GUARDED_BY(mutex_);
  Mailboxes mailboxes_ ABSL_GUARDED_BY(mutex_);
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;     // of all collectives
  uint64_t signals_ ABSL_GUARDED_BY(mutex_) = 0;   // that this member has given
  uint64_t arrivals_ ABSL_GUARDED_BY(mutex_) = 0;  // those without a header, of all members
  Awaited filled_ ABSL_GUARDED_BY(mutex_) = 0;     // the signal of the last filling
  bool asleep_ ABSL_GUARDED_BY(mutex_) = true;     // the group's thread must be kicked
  bool hurried_ ABSL_GUARDED_BY(mutex_) = false;   // it advances what no thread waits for
  int naps_ ABSL_GUARDED_BY(mutex_) = 0;           // of the group's thread since the last start
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_COLLECTIVE_ENGINE_H_
