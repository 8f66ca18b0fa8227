#ifndef DDP_COMM_ARENA_PEER_ARENA_H_
#define DDP_COMM_ARENA_PEER_ARENA_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/free_ranges.h"

namespace ddp::internal {

// The arena of another process, mapped whole for reading and writing. Move-only. The memory stays
// valid until the destruction, also after the peer's death.
//
// A forked child does not inherit the mapping: base() and At() are then invalid addresses in the
// child, and the destruction does nothing there.
//
// Thread: At() and Prefault() may be called from any thread.
class PeerArena {
 public:
  // Maps the memfd `fd` of an Arena with `reservation` bytes. Closes `fd` in every case.
  //   kInvalidArgument: `fd` is not the descriptor of an arena with this reservation. The file is
  //     shorter, or is not sealed against shrinking, so that an access could raise SIGBUS.
  //   kUnavailable: the mapping failed, for example for lack of address space.
  static absl::StatusOr<PeerArena> Map(UniqueFd fd, size_t reservation);

  // As Map(). The groups of a process share one mapping of an arena: it is mapped when the first
  // group asks for it, and unmapped with the last pointer. Thread: any.
  static absl::StatusOr<std::shared_ptr<const PeerArena>> OfProcess(UniqueFd fd,
                                                                    size_t reservation);

  PeerArena(PeerArena&& other) noexcept;
  PeerArena& operator=(PeerArena&& other) noexcept;
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;
  ~PeerArena();

  std::byte* base() const { return base_; }
  size_t size() const { return size_; }

  // Returns the address of the `bytes` at `offset`. Returns null when any of them lies outside the
  // arena: both numbers may come from a peer that is not trusted.
  std::byte* At(uint64_t offset, uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset ? base_ + offset : nullptr;
  }

  // Makes a range present in this mapping, so that the first access takes no page fault. The range
  // is one of the peer's ArenaDemand::ranges(): in a hole, the call would allocate memory. Only a
  // hint: an error, or a range outside the arena, changes nothing.
  void Prefault(const ArenaRange& range) const;

 private:
  PeerArena(std::byte* base, size_t size);
  void Unmap();

  std::byte* base_;  // null: moved from
  size_t size_;
  pid_t process_;  // that made the mapping
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ARENA_PEER_ARENA_H_
