#include "elastic/health/health_page.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace ddp::elastic {
namespace {

constexpr uint64_t kMagic = 0x4547'4150'5044'4844;  // "DHDPPAGE", little-endian
constexpr uint32_t kVersion = 1;
constexpr size_t kPageBytes = 4096;

// A writer is inside for some ten instructions, so a reader that has seen this many torn reads is
// looking at a writer that died inside or that lies.
constexpr int kReadTriesMax = 64;

}  // namespace

// Shared between processes that may be built from different commits: change kVersion with it.
struct HealthPage::Layout {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  // Sequence lock: odd while a writer is inside.
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> commits;  // in this generation
  std::atomic<int64_t> step;
  std::atomic<int64_t> first_step;
  std::atomic<int64_t> first_commit_ns;
  std::atomic<int64_t> last_commit_ns;
  // Only the worker ever locks it. The list pointers of a robust mutex live in the page, so locking
  // a page that somebody else can write would let him choose what our unlock overwrites; a reader
  // only looks at the lock word.
  pthread_mutex_t life;

  void BeginWrite() {
    sequence.store(sequence.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  void EndWrite() {
    sequence.store(sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
};

namespace {

absl::Status InitializeLifeMutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  int error = pthread_mutexattr_init(&attributes);
  if (error == 0) error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  if (error == 0) error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  if (error == 0) error = pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("health page: no robust mutex: ", std::strerror(error)));
}

HealthPage::Worker ReadLife(const pthread_mutex_t& mutex) {
  // The lock word is the first member on every architecture of glibc, and its meaning is the
  // kernel's: the owner's thread id and the died flag.
  const uint32_t word =
      __atomic_load_n(reinterpret_cast<const uint32_t*>(&mutex), __ATOMIC_ACQUIRE);
  if ((word & FUTEX_OWNER_DIED) != 0) return HealthPage::Worker::kDied;
  if ((word & FUTEX_TID_MASK) != 0) return HealthPage::Worker::kAttached;
  return HealthPage::Worker::kNotAttached;
}

}  // namespace

HealthPage::HealthPage(UniqueFd fd, Layout* layout) : fd_(std::move(fd)), layout_(layout) {
  static_assert(std::is_standard_layout_v<Layout>);
  static_assert(sizeof(Layout) <= kPageBytes);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
}

HealthPage::HealthPage(HealthPage&& other) noexcept
    : fd_(std::move(other.fd_)), layout_(std::exchange(other.layout_, nullptr)) {}

HealthPage& HealthPage::operator=(HealthPage&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(layout_, other.layout_);
  return *this;
}

HealthPage::~HealthPage() {
  if (layout_ != nullptr) munmap(layout_, kPageBytes);
}

absl::StatusOr<HealthPage> HealthPage::Create() {
  UniqueFd fd(memfd_create("ddp-health", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid() || ftruncate(fd.get(), kPageBytes) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("health page: ", std::strerror(errno)));
  }
  void* memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("health page: mmap: ", std::strerror(errno)));
  }
  auto* layout = new (memory) Layout();
  HealthPage page(std::move(fd), layout);
  layout->magic = kMagic;
  layout->version = kVersion;
  if (absl::Status status = InitializeLifeMutex(&layout->life); !status.ok()) return status;
  return page;
}

absl::StatusOr<HealthPage> HealthPage::Map(int fd_number) {
  UniqueFd fd(fd_number);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "descriptor ", fd_number, " is not a health page: fstat: ", std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode) || info.st_size != static_cast<off_t>(kPageBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("descriptor ", fd_number,
                                                   " is not a health page: it is no file of ",
                                                   kPageBytes, " bytes"));
  }
  if (fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("health page: fcntl: ", std::strerror(errno)));
  }
  void* memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) {
    return absl::InternalError(absl::StrCat("health page: mmap: ", std::strerror(errno)));
  }
  HealthPage page(std::move(fd), static_cast<Layout*>(memory));
  if (page.layout_->magic != kMagic) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor ", fd_number, " is not a health page: wrong magic number"));
  }
  if (page.layout_->version != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("the health page has version ", page.layout_->version, ", this program knows ",
                     kVersion, ": build the trainer and ddprun from the same release"));
  }
  return page;
}

void HealthPage::BeginGeneration(uint64_t generation) {
  layout_->BeginWrite();
  layout_->generation.store(generation, std::memory_order_relaxed);
  layout_->commits.store(0, std::memory_order_relaxed);
  layout_->step.store(0, std::memory_order_relaxed);
  layout_->first_step.store(0, std::memory_order_relaxed);
  layout_->first_commit_ns.store(0, std::memory_order_relaxed);
  layout_->last_commit_ns.store(0, std::memory_order_relaxed);
  layout_->EndWrite();
}

void HealthPage::CommitStep(int64_t step) {
  const int64_t now_ns = MonotonicNanoseconds();
  const uint64_t commits = layout_->commits.load(std::memory_order_relaxed);
  layout_->BeginWrite();
  layout_->step.store(step, std::memory_order_relaxed);
  if (commits == 0) {
    layout_->first_step.store(step, std::memory_order_relaxed);
    layout_->first_commit_ns.store(now_ns, std::memory_order_relaxed);
  }
  layout_->last_commit_ns.store(now_ns, std::memory_order_relaxed);
  layout_->commits.store(commits + 1, std::memory_order_relaxed);
  layout_->EndWrite();
}

absl::Status HealthPage::Attach() {
  const int error = pthread_mutex_trylock(&layout_->life);
  if (error == EOWNERDEAD) {
    // A worker before us died: the page is ours now.
    pthread_mutex_consistent(&layout_->life);
    return absl::OkStatus();
  }
  if (error == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("health page: another live worker is attached to it");
}

HealthPage::Snapshot HealthPage::Read() const {
  Snapshot snapshot;
  for (int tries = 0; tries < kReadTriesMax; ++tries) {
    const uint64_t before = layout_->sequence.load(std::memory_order_acquire);
    snapshot.generation = layout_->generation.load(std::memory_order_relaxed);
    snapshot.has_step = layout_->commits.load(std::memory_order_relaxed) > 0;
    snapshot.step = layout_->step.load(std::memory_order_relaxed);
    snapshot.first_step = layout_->first_step.load(std::memory_order_relaxed);
    snapshot.first_commit_monotonic_ns = layout_->first_commit_ns.load(std::memory_order_relaxed);
    snapshot.last_commit_monotonic_ns = layout_->last_commit_ns.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t after = layout_->sequence.load(std::memory_order_relaxed);
    if (before == after && before % 2 == 0) break;
  }
  snapshot.worker = ReadLife(layout_->life);
  return snapshot;
}

}  // namespace ddp::elastic
