#include "ddp/comm/arena/peer_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/comm/arena/huge_pages.h"

namespace ddp::internal {

absl::StatusOr<PeerArena> PeerArena::Map(UniqueFd fd, size_t reservation) {
  struct stat status;
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (reservation == 0 || fstat(fd.get(), &status) != 0 || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) < reservation) {
    return absl::InvalidArgumentError(
        absl::StrCat("the descriptor is not of an arena with ", reservation, " bytes"));
  }
  void* const base = MapSharedAligned(fd.get(), reservation);
  if (base == MAP_FAILED) {
    return absl::UnavailableError(
        absl::ErrnoToStatus(errno,
                            absl::StrCat("mmap of a peer's arena of ", reservation, " bytes"))
            .message());
  }
  PeerArena arena(static_cast<std::byte*>(base), reservation);
  // A child would write into the peer's memory, and would keep that memory from being freed.
  if (madvise(base, reservation, MADV_DONTFORK) != 0) {
    return absl::UnavailableError("madvise(MADV_DONTFORK) failed for a peer's arena");
  }
  madvise(base, reservation, MADV_DONTDUMP);  // a dump would fill the holes
  return arena;
}

PeerArena::PeerArena(std::byte* base, size_t size) : base_(base), size_(size), process_(getpid()) {}

PeerArena::PeerArena(PeerArena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      process_(other.process_) {}

PeerArena& PeerArena::operator=(PeerArena&& other) noexcept {
  if (this != &other) {
    Unmap();
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, 0);
    process_ = other.process_;
  }
  return *this;
}

PeerArena::~PeerArena() { Unmap(); }

void PeerArena::Prefault(const ArenaRange& range) const {
#ifdef MADV_POPULATE_WRITE
  if (std::byte* const begin = At(range.offset, range.bytes)) {
    madvise(begin, range.bytes, MADV_POPULATE_WRITE);
  }
#endif
}

// In a forked child the addresses may belong to another mapping.
void PeerArena::Unmap() {
  if (base_ != nullptr && getpid() == process_) munmap(base_, size_);
  base_ = nullptr;
}

}  // namespace ddp::internal
