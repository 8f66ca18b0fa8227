#include "ddp/comm/arena/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include <glog/logging.h>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "ddp/comm/arena/huge_pages.h"

namespace ddp::internal {
namespace {

// A smaller reservation is not worth another attempt.
constexpr size_t kLeastReservation = size_t{64} << 20;
// A process maps the whole reservation of every peer, once, and has 128 TiB of addresses: enough
// for 256 ranks of a host three times over.
#ifdef __SANITIZE_THREAD__
// ThreadSanitizer leaves 1.5 TiB to all mappings.
constexpr size_t kMostReservation = size_t{1} << 33;
#else
constexpr size_t kMostReservation = size_t{1} << 37;
#endif
// Twice the physical memory: the memory can never be used up by lack of a contiguous range.
size_t ReservationOfProcess() {
  const size_t physical = static_cast<size_t>(std::max(sysconf(_SC_PHYS_PAGES), 1L)) *
                          static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(std::bit_ceil(2 * physical), kMostReservation);
}

std::optional<size_t> LimitOf(__rlimit_resource resource) {
  rlimit limit;
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// Returns `bytes`, or less where a resource limit allows less. ftruncate() beyond RLIMIT_FSIZE
// would raise SIGXFSZ. Of the addresses that are left, half is for the arenas of all ranks and a
// second mapping of this process's own.
size_t WithinLimits(size_t bytes, int ranks) {
  if (const auto file = LimitOf(RLIMIT_FSIZE)) bytes = std::min(bytes, std::bit_floor(*file));
  if (const auto addresses = LimitOf(RLIMIT_AS)) {
    size_t used_pages = 0;
    std::ifstream("/proc/self/statm") >> used_pages;
    const size_t used = used_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t left = *addresses - std::min(*addresses, used);
    bytes = std::min(bytes, std::bit_floor(left / (2 * (static_cast<size_t>(ranks) + 1))));
  }
  return bytes;
}

absl::Status ErrnoStatus(const char* call) {
  return absl::ErrnoToStatus(errno, absl::StrCat("the arena of shared memory: ", call));
}

}  // namespace

// The arenas of this process, which fork() makes private in the child. Thread-safe. A fork waits
// for changes of the list, so the child finds the list complete and its lock free.
class ArenaForkGuard {
 public:
  static ArenaForkGuard& OfProcess() {
    static ArenaForkGuard& guard = *new ArenaForkGuard();
    return guard;
  }

  void Add(Arena* arena) {
    MutexLock lock(mutex_);
    arenas_.push_back(arena);
  }

  void Remove(Arena* arena) {
    MutexLock lock(mutex_);
    arenas_.erase(std::remove(arenas_.begin(), arenas_.end(), arena), arenas_.end());
  }

 private:
  ArenaForkGuard() { pthread_atfork(&BeforeFork, &AfterForkInParent, &AfterForkInChild); }

  static void BeforeFork() ABSL_NO_THREAD_SAFETY_ANALYSIS { OfProcess().mutex_.Lock(); }
  static void AfterForkInParent() ABSL_NO_THREAD_SAFETY_ANALYSIS { OfProcess().mutex_.Unlock(); }
  static void AfterForkInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (Arena* const arena : OfProcess().arenas_) arena->BecomePrivate();
    OfProcess().mutex_.Unlock();
  }

  Mutex mutex_;
  std::vector<Arena*> arenas_ ABSL_GUARDED_BY(mutex_);
};

Arena& Arena::OfProcess(int ranks) {
  static Arena& arena = *new Arena(ReservationOfProcess(), ranks);
  return arena;
}

Arena::Arena(size_t reservation_bytes, int ranks)
    : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  status_ = Reserve(std::max(reservation_bytes, kSmallestBlock), ranks);
  if (status_.ok()) ArenaForkGuard::OfProcess().Add(this);
}

Arena::~Arena() {
  if (!status_.ok()) return;
  ArenaForkGuard::OfProcess().Remove(this);
  munmap(base_, reservation_);
  munmap(slots_, (reservation_ >> kSlotShift) * sizeof(Slot));
}

absl::Status Arena::Reserve(size_t bytes, int ranks) {
  bytes = WithinLimits(std::bit_ceil(std::max(bytes, page_)), ranks);
  if (bytes < page_) {
    return absl::UnavailableError(
        "a limit of the address space (ulimit -v) or of file sizes (ulimit -f) leaves the arena of "
        "shared memory nothing");
  }
  UniqueFd fd(memfd_create("ddp-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return absl::UnavailableError(ErrnoStatus("memfd_create").message());
  void* base = MAP_FAILED;
  for (;; bytes /= 2) {
    base = MapSharedAligned(fd.get(), bytes);
    if (base != MAP_FAILED) break;
    if (bytes <= kLeastReservation) return absl::UnavailableError(ErrnoStatus("mmap").message());
  }
  void* const slots = mmap(nullptr, (bytes >> kSlotShift) * sizeof(Slot), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  // Holes may still be punched after the seals.
  if (slots == MAP_FAILED || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const absl::Status status = absl::UnavailableError(ErrnoStatus("mmap or ftruncate").message());
    munmap(base, bytes);
    if (slots != MAP_FAILED) munmap(slots, (bytes >> kSlotShift) * sizeof(Slot));
    return status;
  }
  madvise(base, bytes, MADV_DONTDUMP);
  fd_ = std::move(fd);
  base_ = static_cast<std::byte*>(base);
  reservation_ = bytes;
  slots_ = static_cast<Slot*>(slots);
  MutexLock lock(mutex_);
  ranges_.Add({.offset = 0, .bytes = bytes});
  return absl::OkStatus();
}

uint64_t Arena::Cut(size_t bytes) {
  const std::optional<uint64_t> offset = ranges_.Take(bytes);
  if (!offset.has_value()) return kNoBlock;
  if (extent_.load(std::memory_order_relaxed) < *offset + bytes) extent_.store(*offset + bytes);
  statistics_.bytes_touched += bytes;
  return *offset;
}

void Arena::Release(SizeClass& size_class, size_t bytes, uint64_t offset) {
  bytes = Rounded(bytes);
  if (madvise(base_ + offset, bytes, MADV_REMOVE) != 0) {
    LOG(WARNING) << "the arena of shared memory cannot give " << bytes
                 << " bytes back: " << ErrnoStatus("madvise");
  }
  --size_class.blocks;
  statistics_.bytes_touched -= bytes;
  ranges_.Add({.offset = offset, .bytes = bytes});
}

absl::Status Arena::Populate(uint64_t offset, size_t bytes) const {
  UseHugePages(base_ + offset, bytes);
#ifdef MADV_POPULATE_WRITE
  if (bytes == 0 || madvise(base_ + offset, bytes, MADV_POPULATE_WRITE) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL) {
    return absl::ResourceExhaustedError(ErrnoStatus("madvise(MADV_POPULATE_WRITE)").message());
  }
#endif
  // Linux before 5.14. The blocks are new, so their content does not matter.
  for (uint64_t done = 0; done < bytes; done += page_) {
    *reinterpret_cast<volatile std::byte*>(base_ + offset + done) = std::byte{0};
  }
  return absl::OkStatus();
}

absl::StatusOr<ArenaDemand> Arena::AddDemand(const DemandOptions& options) {
  DDP_RETURN_IF_ERROR(status_);
  if (forked_.load(std::memory_order_relaxed)) {
    return absl::FailedPreconditionError("a forked child has no arena of shared memory");
  }
  std::map<size_t, size_t> gradients;  // how many have a size
  size_t capacity = options.capacity_bytes;
  for (const size_t bytes : options.gradient_bytes) {
    if (bytes < kSmallestBlock) continue;
    ++gradients[bytes];
    if (options.capacity_bytes == 0) capacity += 2 * Rounded(bytes);
  }
  std::vector<size_t> made;  // sizes of new blocks, which lie side by side
  size_t present = 0;        // their sum
  uint64_t begin = kNoBlock;
  {
    MutexLock lock(mutex_);
    statistics_.capacity += capacity;
    for (const auto& [bytes, count] : gradients) {
      SizeClass& size_class = classes_[bytes];
      size_class.demands += count;
      for (size_t blocks = size_class.blocks;
           blocks < size_class.demands && present + Rounded(bytes) <= Rounded(capacity); ++blocks) {
        made.push_back(bytes);
        present += Rounded(bytes);
      }
    }
    if (!made.empty()) begin = Cut(present);
    if (begin == kNoBlock) made.clear();  // Allocate() looks for room block by block
    for (const size_t bytes : made) ++classes_[bytes].blocks;
  }
  const ArenaDemand demand(
      this, [this, gradients, capacity](const void*) { Withdraw(gradients, capacity); });
  if (made.empty()) return demand;
  const absl::Status status = Populate(begin, present);
  {
    MutexLock lock(mutex_);
    uint64_t end = begin + present;
    for (auto bytes = made.rbegin(); bytes != made.rend(); ++bytes) {  // the lowest is served first
      end -= Rounded(*bytes);
      classes_[*bytes].free.push_back(end);
    }
  }
  if (!status.ok()) return status;  // the demand withdraws itself
  return demand;
}

void Arena::Withdraw(const std::map<size_t, size_t>& gradients, size_t capacity) {
  if (forked_.load(std::memory_order_relaxed)) return;
  MutexLock lock(mutex_);
  statistics_.capacity -= capacity;
  for (const auto& [bytes, count] : gradients) {
    SizeClass& size_class = classes_[bytes];
    size_class.demands -= count;
    const size_t outliving = std::min(count, size_class.in_use - size_class.outliving);
    size_class.outliving += outliving;
    statistics_.outliving += outliving * Rounded(bytes);
  }
  for (auto entry = classes_.begin(); entry != classes_.end();) {
    auto& [bytes, size_class] = *entry;
    while (!size_class.free.empty() &&
           (size_class.demands == 0 || statistics_.bytes_touched > Limit())) {
      Release(size_class, bytes, size_class.free.back());
      size_class.free.pop_back();
    }
    const bool used = size_class.demands > 0 || size_class.blocks > 0;
    entry = used ? std::next(entry) : classes_.erase(entry);
  }
}

void* Arena::Allocate(size_t bytes) {
  if (bytes < kSmallestBlock || forked_.load(std::memory_order_relaxed)) return nullptr;
  MutexLock lock(mutex_);
  const auto found = classes_.find(bytes);
  if (found == classes_.end() || found->second.demands == 0) return nullptr;
  SizeClass& size_class = found->second;
  uint64_t offset = kNoBlock;
  if (!size_class.free.empty()) {
    offset = size_class.free.back();
    size_class.free.pop_back();
  } else if (statistics_.bytes_touched + Rounded(bytes) <= Limit()) {
    offset = Cut(Rounded(bytes));
    if (offset != kNoBlock) ++size_class.blocks;
  }
  if (offset == kNoBlock) {
    ++statistics_.refusals;
    return nullptr;
  }
  ++size_class.in_use;
  statistics_.bytes_in_use += Rounded(bytes);
  Slot& slot = SlotOf(offset);
  slot.claim.store(0, std::memory_order_relaxed);
  slot.live.store(Live(offset, bytes), std::memory_order_release);
  return base_ + offset;
}

absl::StatusOr<std::shared_ptr<std::byte>> Arena::AllocateAlone(size_t bytes) {
  bytes = std::max(bytes, kSmallestBlock);
  auto demand = AddDemand({.gradient_bytes = {bytes}, .capacity_bytes = bytes});
  DDP_RETURN_IF_ERROR(demand.status());
  auto* const block = static_cast<std::byte*>(Allocate(bytes));
  if (block == nullptr) return absl::ResourceExhaustedError("the arena of shared memory is full");
  return std::shared_ptr<std::byte>(
      block, [this, demand = *std::move(demand)](std::byte* memory) { Free(memory); });
}

void Arena::Free(void* block) {
  if (block == nullptr || forked_.load(std::memory_order_relaxed)) return;
  CHECK(Contains(block, 1)) << "an address of no block";
  const uint64_t offset = static_cast<std::byte*>(block) - base_;
  MutexLock lock(mutex_);
  const uint64_t live = SlotOf(offset).live.exchange(0, std::memory_order_relaxed);
  const size_t bytes = live >> 2;
  CHECK(live != 0 && offset % kUnit == 0 && live == Live(offset, bytes))
      << "no block is allocated at offset " << offset;
  SizeClass& size_class = classes_[bytes];
  --size_class.in_use;
  statistics_.bytes_in_use -= Rounded(bytes);
  // The arena does not know which blocks have lost their demand. No more have than are allocated.
  if (size_class.outliving > size_class.in_use) {
    --size_class.outliving;
    statistics_.outliving -= Rounded(bytes);
  }
  if (size_class.demands > 0 && statistics_.bytes_touched <= Limit()) {
    return size_class.free.push_back(offset);
  }
  Release(size_class, bytes, offset);
  if (size_class.demands == 0 && size_class.blocks == 0) classes_.erase(bytes);
}

Arena::Statistics Arena::statistics() const {
  if (forked_.load(std::memory_order_relaxed)) return {};
  MutexLock lock(mutex_);
  return statistics_;
}

// Only mmap and madvise: another thread may have held any lock at the time of the fork.
void Arena::BecomePrivate() {
  forked_.store(true, std::memory_order_relaxed);
  const size_t extent = extent_.load();
  if (extent > 0 && mmap(base_, extent, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd_.get(), 0) == MAP_FAILED) {
    // The child may then only read: a write raises SIGSEGV rather than reach the parent.
    mprotect(base_, extent, PROT_READ);
  }
  madvise(base_, extent, MADV_DONTDUMP);
  // No block lies beyond. The addresses stay reserved, so Contains() stays true to its word.
  mmap(base_ + extent, reservation_ - extent, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

}  // namespace ddp::internal
