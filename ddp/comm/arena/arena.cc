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

// Adds a range above all of `ranges`, as part of the last one where the two touch.
void Append(ArenaRange range, std::vector<ArenaRange>& ranges) {
  if (!ranges.empty() && ranges.back().offset + ranges.back().bytes == range.offset) {
    ranges.back().bytes += range.bytes;
  } else {
    ranges.push_back(range);
  }
}

size_t Hash(size_t bytes) { return (bytes * 0x9E3779B97F4A7C15u) >> 32; }

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
    : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      classes_(std::make_unique<SizeClass[]>(kClasses)) {
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

Arena::SizeClass* Arena::Find(size_t bytes) const {
  const size_t hash = Hash(bytes);
  for (size_t i = 0; i < kProbes; ++i) {
    SizeClass& entry = classes_[(hash + i) % kClasses];
    const size_t found = entry.bytes.load(std::memory_order_acquire);
    if (found == bytes) return &entry;
    if (found == 0) break;
  }
  return nullptr;
}

Arena::SizeClass* Arena::FindOrAdd(size_t bytes) {
  if (SizeClass* const found = Find(bytes)) return found;
  const size_t hash = Hash(bytes);
  for (size_t i = 0; i < kProbes; ++i) {
    SizeClass& entry = classes_[(hash + i) % kClasses];
    if (entry.demands.load(std::memory_order_relaxed) != 0 || entry.blocks != 0) continue;
    // The entry or its size is unused. A reader that looks for the old size finds nothing.
    entry.bytes.store(bytes, std::memory_order_release);
    return &entry;
  }
  return nullptr;
}

uint64_t Arena::Cut(SizeClass& size_class) {
  const size_t bytes = Rounded(size_class.bytes.load(std::memory_order_relaxed));
  const std::optional<uint64_t> offset = ranges_.Take(bytes);
  if (!offset.has_value()) return kNoBlock;
  if (extent_.load(std::memory_order_relaxed) < *offset + bytes) extent_.store(*offset + bytes);
  ++size_class.blocks;
  statistics_.bytes_touched += bytes;
  return *offset;
}

void Arena::PushFree(SizeClass& size_class, uint64_t offset) {
  SlotOf(offset).next_free = std::exchange(size_class.first_free, offset);
}

uint64_t Arena::PopFree(SizeClass& size_class) {
  const uint64_t offset = size_class.first_free;
  if (offset != kNoBlock) size_class.first_free = SlotOf(offset).next_free;
  return offset;
}

void Arena::Release(SizeClass& size_class, uint64_t offset) {
  const size_t bytes = Rounded(size_class.bytes.load(std::memory_order_relaxed));
  if (madvise(base_ + offset, bytes, MADV_REMOVE) != 0) {
    LOG(WARNING) << "the arena of shared memory cannot give " << bytes
                 << " bytes back: " << ErrnoStatus("madvise");
  }
  --size_class.blocks;
  statistics_.bytes_touched -= bytes;
  ranges_.Add({.offset = offset, .bytes = bytes});
}

absl::Status Arena::Populate(const ArenaRange& range) const {
  UseHugePages(base_ + range.offset, range.bytes);
#ifdef MADV_POPULATE_WRITE
  if (madvise(base_ + range.offset, range.bytes, MADV_POPULATE_WRITE) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL) {
    return absl::ResourceExhaustedError(ErrnoStatus("madvise(MADV_POPULATE_WRITE)").message());
  }
#endif
  // Linux before 5.14. The blocks are new, so their content does not matter.
  for (uint64_t done = 0; done < range.bytes; done += page_) {
    *reinterpret_cast<volatile std::byte*>(base_ + range.offset + done) = std::byte{0};
  }
  return absl::OkStatus();
}

absl::StatusOr<ArenaDemand> Arena::AddDemand(const DemandOptions& options) {
  DDP_RETURN_IF_ERROR(status_);
  if (forked_.load(std::memory_order_relaxed)) {
    return absl::FailedPreconditionError("a forked child has no arena of shared memory");
  }
  std::map<size_t, size_t> gradients;
  std::map<uint64_t, SizeClass*> made;  // by offset; in no list yet
  size_t capacity = 0;
  {
    MutexLock lock(mutex_);
    for (const size_t bytes : options.gradient_bytes) {
      SizeClass* const size_class = bytes < kSmallestBlock ? nullptr : FindOrAdd(bytes);
      if (size_class == nullptr) continue;
      size_class->demands.fetch_add(1, std::memory_order_relaxed);
      ++gradients[bytes];
      capacity += 2 * Rounded(bytes);
    }
    if (options.capacity_bytes > 0) capacity = options.capacity_bytes;
    statistics_.capacity += capacity;
    size_t left = Rounded(capacity);
    for (const auto& [bytes, count] : gradients) {
      SizeClass& size_class = *Find(bytes);
      while (size_class.blocks < size_class.demands.load(std::memory_order_relaxed) &&
             Rounded(bytes) <= left) {
        const uint64_t offset = Cut(size_class);
        if (offset == kNoBlock) break;  // Allocate() will be refused
        made.emplace(offset, &size_class);
        left -= Rounded(bytes);
      }
    }
  }
  std::vector<ArenaRange> ranges;
  for (const auto& [offset, size_class] : made) {
    Append({.offset = offset, .bytes = Rounded(size_class->bytes.load(std::memory_order_relaxed))},
           ranges);
  }
  absl::Status status;
  for (const ArenaRange& range : ranges) {
    status = Populate(range);
    if (!status.ok()) break;
  }
  {
    // The lowest offset is the first to be served.
    MutexLock lock(mutex_);
    for (auto block = made.rbegin(); block != made.rend(); ++block) {
      PushFree(*block->second, block->first);
    }
  }
  ArenaDemand demand(this, std::move(gradients), capacity, std::move(ranges));
  if (!status.ok()) return status;  // the demand withdraws itself
  return demand;
}

void Arena::Withdraw(const std::map<size_t, size_t>& gradients, size_t capacity) {
  if (forked_.load(std::memory_order_relaxed)) return;
  MutexLock lock(mutex_);
  statistics_.capacity -= capacity;
  ++withdrawals_;
  for (const auto& [bytes, count] : gradients) {
    SizeClass& size_class = *Find(bytes);
    // The arena does not know the demand's blocks among the allocated ones. Free() corrects an
    // estimate that is too high.
    size_class.withdrawals = withdrawals_;
    const size_t outliving = std::min(count, size_class.in_use - size_class.outliving);
    size_class.outliving += outliving;
    statistics_.outliving += outliving * Rounded(bytes);
    if (size_class.demands.fetch_sub(count, std::memory_order_relaxed) != count) continue;
    for (uint64_t offset; (offset = PopFree(size_class)) != kNoBlock;) Release(size_class, offset);
  }
  for (size_t i = 0; i < kClasses && statistics_.bytes_touched > Limit(); ++i) {
    while (statistics_.bytes_touched > Limit()) {
      const uint64_t offset = PopFree(classes_[i]);
      if (offset == kNoBlock) break;
      Release(classes_[i], offset);
    }
  }
}

void* Arena::Allocate(size_t bytes) {
  if (bytes < kSmallestBlock || forked_.load(std::memory_order_relaxed)) return nullptr;
  SizeClass* const size_class = Find(bytes);
  if (size_class == nullptr || size_class->demands.load(std::memory_order_relaxed) == 0) {
    return nullptr;
  }
  MutexLock lock(mutex_);
  // The last demand may have been withdrawn, and the entry may have another size by now.
  if (size_class->bytes.load(std::memory_order_relaxed) != bytes ||
      size_class->demands.load(std::memory_order_relaxed) == 0) {
    return nullptr;
  }
  uint64_t offset = PopFree(*size_class);
  if (offset == kNoBlock && statistics_.bytes_touched + Rounded(bytes) <= Limit()) {
    offset = Cut(*size_class);
  }
  if (offset == kNoBlock) {
    ++statistics_.refusals;
    return nullptr;
  }
  ++size_class->in_use;
  statistics_.bytes_in_use += Rounded(bytes);
  Slot& slot = SlotOf(offset);
  slot.claim.store(0, std::memory_order_relaxed);
  slot.withdrawals = withdrawals_;
  slot.live.store(Live(offset, bytes), std::memory_order_release);
  return base_ + offset;
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
  SizeClass& size_class = *Find(bytes);
  --size_class.in_use;
  statistics_.bytes_in_use -= Rounded(bytes);
  if (size_class.outliving > 0 && SlotOf(offset).withdrawals < size_class.withdrawals) {
    --size_class.outliving;
    statistics_.outliving -= Rounded(bytes);
  }
  if (size_class.demands.load(std::memory_order_relaxed) == 0 ||
      statistics_.bytes_touched > Limit()) {
    Release(size_class, offset);
  } else {
    PushFree(size_class, offset);
  }
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

ArenaDemand::ArenaDemand(Arena* arena, std::map<size_t, size_t> gradients, size_t capacity,
                         std::vector<ArenaRange> ranges)
    : arena_(arena),
      gradients_(std::move(gradients)),
      capacity_(capacity),
      ranges_(std::move(ranges)) {}

ArenaDemand::ArenaDemand(ArenaDemand&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      gradients_(std::move(other.gradients_)),
      capacity_(other.capacity_),
      ranges_(std::move(other.ranges_)) {}

ArenaDemand& ArenaDemand::operator=(ArenaDemand&& other) noexcept {
  if (this != &other) {
    Withdraw();
    arena_ = std::exchange(other.arena_, nullptr);
    gradients_ = std::move(other.gradients_);
    capacity_ = other.capacity_;
    ranges_ = std::move(other.ranges_);
  }
  return *this;
}

ArenaDemand::~ArenaDemand() { Withdraw(); }

void ArenaDemand::Withdraw() {
  if (Arena* const arena = std::exchange(arena_, nullptr)) arena->Withdraw(gradients_, capacity_);
}

}  // namespace ddp::internal
