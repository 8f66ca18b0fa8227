#ifndef DDP_COMM_ARENA_PEER_ARENA_H_
#define DDP_COMM_ARENA_PEER_ARENA_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::internal {

// The arena of another process, mapped whole for reading and writing. The memory stays valid until
// the destruction, also after the peer's death. Thread-safe.
//
// A forked child does not inherit the mapping: base() and At() are then invalid addresses in the
// child, and the destruction does nothing there.
class PeerArena {
 public:
  // Maps the memfd `fd` of an Arena with `reservation` bytes. Closes `fd` in every case. The groups
  // of a process share one mapping of an arena, which ends with the last pointer.
  //   kInvalidArgument: `fd` is not the descriptor of an arena with this reservation. The file is
  //     shorter, or is not sealed against shrinking, so that an access could raise SIGBUS.
  //   kUnavailable: the mapping failed, for example for lack of address space.
  static absl::StatusOr<std::shared_ptr<const PeerArena>> Map(UniqueFd fd, size_t reservation);

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

 private:
  PeerArena(std::byte* base, size_t size) : base_(base), size_(size), process_(::getpid()) {}

  std::byte* const base_;
  const size_t size_;
  const pid_t process_;  // that made the mapping
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ARENA_PEER_ARENA_H_
