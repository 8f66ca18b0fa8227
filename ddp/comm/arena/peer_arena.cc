#include "ddp/comm/arena/peer_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

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

absl::StatusOr<std::shared_ptr<const PeerArena>> PeerArena::Map(UniqueFd fd, size_t reservation) {
  struct stat status;
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (reservation == 0 || fstat(fd.get(), &status) != 0 || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) < reservation) {
    return absl::InvalidArgumentError(
        absl::StrCat("the descriptor is not of an arena with ", reservation, " bytes"));
  }
  Mappings& mappings = Mappings::OfProcess();
  MutexLock lock(mappings.mutex);
  std::erase_if(mappings.by_file, [](const auto& entry) { return entry.second.expired(); });
  const Mappings::File file = {status.st_dev, status.st_ino, reservation};
  if (const auto known = mappings.by_file.find(file); known != mappings.by_file.end()) {
    if (auto mapped = known->second.lock()) return mapped;
  }
  void* const base = MapSharedAligned(fd.get(), reservation);
  if (base == MAP_FAILED) {
    return absl::UnavailableError(
        absl::ErrnoToStatus(errno,
                            absl::StrCat("mmap of a peer's arena of ", reservation, " bytes"))
            .message());
  }
  const std::shared_ptr<const PeerArena> arena(
      new PeerArena(static_cast<std::byte*>(base), reservation));
  // A child would write into the peer's memory, and would keep that memory from being freed.
  if (madvise(base, reservation, MADV_DONTFORK) != 0) {
    return absl::UnavailableError("madvise(MADV_DONTFORK) failed for a peer's arena");
  }
  madvise(base, reservation, MADV_DONTDUMP);  // a dump would fill the holes
  mappings.by_file[file] = arena;
  return arena;
}

// In a forked child the addresses may belong to another mapping.
PeerArena::~PeerArena() {
  if (getpid() == process_) munmap(base_, size_);
}

}  // namespace ddp::internal
