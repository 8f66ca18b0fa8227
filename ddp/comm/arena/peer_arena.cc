#include "ddp/comm/arena/peer_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "ddp/comm/arena/huge_pages.h"

namespace ddp::internal {
namespace {

// The mappings of this process. A mapping keeps its file, so no other file has the same number.
struct Mappings {
  using File = std::tuple<dev_t, ino_t, size_t>;  // the last: how many bytes are mapped

  static Mappings& OfProcess() {
    static Mappings& mappings = *new Mappings();  // groups may outlive all statics
    return mappings;
  }

  Mutex mutex;
  std::map<File, std::weak_ptr<const PeerArena>> by_file ABSL_GUARDED_BY(mutex);
};

}  // namespace

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

absl::StatusOr<std::shared_ptr<const PeerArena>> PeerArena::OfProcess(UniqueFd fd,
                                                                      size_t reservation) {
  struct stat status {};
  if (fstat(fd.get(), &status) != 0) return absl::ErrnoToStatus(errno, "fstat of a peer's arena");
  Mappings& mappings = Mappings::OfProcess();
  MutexLock lock(mappings.mutex);
  std::erase_if(mappings.by_file, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const PeerArena>& known =
      mappings.by_file[{status.st_dev, status.st_ino, reservation}];
  if (auto mapped = known.lock()) return mapped;
  absl::StatusOr<PeerArena> arena = Map(std::move(fd), reservation);
  if (!arena.ok()) return arena.status();
  auto mapped = std::make_shared<const PeerArena>(*std::move(arena));
  known = mapped;
  return mapped;
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
