// Memory of this process that the other processes of the host can map.
//
// An Arena is one memfd, mapped whole. Peers map the same descriptor (peer_arena.h) and then read
// and write the arena's blocks in place. A block is named by its offset in the file.
//
// Blocks. Only sizes that a demand has registered are served. The blocks of a size without a
// demand, and blocks beyond the capacity, are given back to the system when they are free. The
// owner must keep a block allocated until every peer has finished with it: a later write would land
// in the next tensor, or would bring released memory back.
//
// Demands. A model adds a demand with the sizes of its gradients. It raises the capacity and makes
// memory present for the gradients, so that no backward takes page faults. A block may outlive its
// demand: it takes no capacity from the demands that are left.
//
// Fork. In a forked child the arena is a private copy: a write of the child reaches neither the
// parent nor the peers. A block that the child has not written shows later writes of the parent.
// The child can allocate nothing, and frees nothing.
//
// The file has its size from the start, and is sealed: no peer can be made to fault by truncation.
// Holes cost nothing. Core dumps leave the mapping out: they would fill the holes.
#ifndef DDP_COMM_ARENA_ARENA_H_
#define DDP_COMM_ARENA_ARENA_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/free_ranges.h"

namespace ddp::internal {

// The demand of one model. The destruction of the last copy withdraws it, and gives the memory of
// free blocks back. The arena outlives it.
using ArenaDemand = std::shared_ptr<const void>;

// Thread-safe.
class Arena {
 public:
  // Smaller gradients are packed by their reader, so the arena serves no smaller block.
  static constexpr size_t kSmallestBlock = size_t{16} * 1024;

  struct DemandOptions {
    // The size of each gradient. Sizes below kSmallestBlock are ignored.
    std::vector<size_t> gradient_bytes;
    // The demand raises the capacity by this. 0: by twice the sum of the gradients. One sum is for
    // the gradients, the other for tensors of equal sizes that a backward makes beside them.
    size_t capacity_bytes = 0;
  };

  struct Statistics {
    size_t bytes_in_use = 0;   // of the allocated blocks
    size_t bytes_touched = 0;  // of the allocated and the free blocks: memory that the arena holds
    size_t capacity = 0;       // of the demands. The limit of bytes_touched is `outliving` higher.
    size_t outliving = 0;      // of allocated blocks whose demand has been withdrawn
    uint64_t refusals = 0;     // calls of Allocate() for a served size that found no room
  };

  // Returns the arena of this process. LibTorch has one CPU allocator for a process, and the arena
  // feeds that allocator. The arena is never destroyed, because tensors may outlive all statics.
  // The first call makes the arena. A failure stands in status(). `ranks`: see the constructor.
  static Arena& OfProcess(int ranks = kRanks);

  // How many ranks a host is thought to have, until a group says it.
  static constexpr int kRanks = 8;

  // Reserves at most `reservation_bytes` of address space: less when the system or a resource limit
  // refuses. A limit of the address space (ulimit -v) leaves room for the arenas of `ranks`
  // processes, each as large as this one. A test makes its own arena. The arena outlives its blocks
  // and its demands.
  explicit Arena(size_t reservation_bytes, int ranks = kRanks);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The error of the construction. An arena with an error has no memory and refuses everything:
  //   kUnavailable: memfd_create, ftruncate or mmap failed, or a resource limit forbids it.
  const absl::Status& status() const { return status_; }

  // The memfd; -1 after an error. Close-on-exec. The arena owns the descriptor.
  int fd() const { return fd_.get(); }
  std::byte* base() const { return base_; }
  size_t reservation() const { return reservation_; }

  // Registers the sizes of a model's gradients. Blocks while the kernel makes the memory present.
  //   the construction's error: see status().
  //   kFailedPrecondition: this process is a forked child of the arena's process.
  //   kResourceExhausted: the kernel has no memory for the gradients. Nothing has changed.
  absl::StatusOr<ArenaDemand> AddDemand(const DemandOptions& options);

  // Returns a block of `bytes`, aligned to a page, with any content. Returns null when
  //   - no demand has registered this size;
  //   - the capacity is used up;
  //   - this process is a forked child.
  // The caller owns the block and gives it back with Free().
  void* Allocate(size_t bytes);

  // Returns a block of at least `bytes` with a demand of its own, which ends with the block.
  // Errors: as AddDemand(), and kResourceExhausted when the arena has no room.
  absl::StatusOr<std::shared_ptr<std::byte>> AllocateAlone(size_t bytes);

  // Frees a block. `block` is null or the start of an allocated block: anything else is a CHECK
  // failure. Any thread may free.
  void Free(void* block);

  // Returns true when the `bytes` at `p` lie inside the reservation. Wait-free.
  bool Contains(const void* p, size_t bytes) const {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(base_);
    return offset < reservation_ && bytes <= reservation_ - offset;
  }

  // Returns the offset of the allocated block that starts at `p` and was allocated with exactly
  // `bytes`. Returns nullopt for any other address or size, and in a forked child. Wait-free. The
  // answer holds as long as the caller keeps the block allocated.
  std::optional<uint64_t> BlockAt(const void* p, size_t bytes) const {
    if (bytes < kSmallestBlock || !Contains(p, bytes)) return std::nullopt;
    const uint64_t offset = static_cast<const std::byte*>(p) - base_;
    if (offset % kUnit != 0) return std::nullopt;
    const uint64_t live = SlotOf(offset).live.load(std::memory_order_acquire);
    if (live != Live(offset, bytes) || forked_.load(std::memory_order_relaxed)) return std::nullopt;
    return offset;
  }

  // Claims the allocated block at `offset`, an answer of BlockAt(), for `pass`. Returns false when
  // the last claim of the block was for the same pass. Two gradients with one storage both lie in
  // one block; the second claim fails. `pass` is not 0 and is unique in the process. Allocate()
  // makes a block unclaimed. Wait-free.
  bool Claim(uint64_t offset, uint64_t pass) {
    return SlotOf(offset).claim.exchange(pass, std::memory_order_relaxed) != pass;
  }

  Statistics statistics() const;

 private:
  friend class ArenaForkGuard;

  // A block starts at a page and has at least kSmallestBlock bytes. So at most one block starts in
  // each piece of kSmallestBlock bytes, and the piece has one slot.
  static constexpr int kSlotShift = 14;
  static_assert(size_t{1} << kSlotShift == kSmallestBlock);
  // Every page size is a multiple of this.
  static constexpr size_t kUnit = size_t{4} * 1024;
  static constexpr uint64_t kNoBlock = ~uint64_t{0};

  struct Slot {
    std::atomic<uint64_t> live;   // Live() of the allocated block; 0: none
    std::atomic<uint64_t> claim;  // the last pass; 0: none
  };

  // The blocks of one size.
  struct SizeClass {
    size_t demands = 0;    // the gradients of this size in all demands
    size_t blocks = 0;     // allocated and free; those of a running AddDemand() too
    size_t in_use = 0;     // allocated
    size_t outliving = 0;  // allocated; the demand has been withdrawn. An estimate: see Free()
    std::vector<uint64_t> free;  // the last one is served next
  };

  // The exact size of an allocated block, and the unit of its piece at which the block starts.
  static uint64_t Live(uint64_t offset, size_t bytes) {
    return (uint64_t{bytes} << 2) | ((offset / kUnit) & 3);
  }
  size_t Rounded(size_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }

  Slot& SlotOf(uint64_t offset) const { return slots_[offset >> kSlotShift]; }

  absl::Status Reserve(size_t bytes, int ranks);
  // Takes `bytes` of the unused ranges. Returns kNoBlock when no range is large enough.
  uint64_t Cut(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the memory of a block that is neither allocated nor free back to the system.
  void Release(SizeClass& size_class, size_t bytes, uint64_t offset)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Undoes a demand: lowers the capacity, and releases free blocks. All free blocks of sizes
  // without a demand are released, and others while the arena holds more than its limit.
  void Withdraw(const std::map<size_t, size_t>& gradients, size_t capacity);
  size_t Limit() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return statistics_.capacity + statistics_.outliving;
  }
  // Makes memory present.
  absl::Status Populate(uint64_t offset, size_t bytes) const;
  // The child's part of fork().
  void BecomePrivate();

  // Constant after construction.
  const size_t page_;
  absl::Status status_;
  UniqueFd fd_;
  std::byte* base_ = nullptr;
  size_t reservation_ = 0;
  Slot* slots_ = nullptr;  // one for each kSmallestBlock bytes of the reservation

  std::atomic<bool> forked_{false};  // true in a forked child
  std::atomic<uint64_t> extent_{0};  // no block has ever ended after this offset

  mutable Mutex mutex_;
  FreeRanges ranges_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<size_t, SizeClass> classes_ ABSL_GUARDED_BY(mutex_);  // by size
  Statistics statistics_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ARENA_ARENA_H_
