#include "ddp/comm/host_group/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ddp/comm/host_group/futex.h"

namespace ddp::internal {
namespace {

// Names this layout: a change of a struct in segment.h, or of what its fields mean, takes a new
// number. "!ddp-016"
constexpr uint64_t kMagic = 0x3631302d70646421;

constexpr size_t RoundUp(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

absl::Status Error(const char* what) { return absl::ErrnoToStatus(errno, what); }

// The mutex by which the kernel tells the peers that a member has ended.
absl::Status InitLife(pthread_mutex_t& life) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(&life, &attributes);
  pthread_mutexattr_destroy(&attributes);
  return error == 0 ? absl::OkStatus() : absl::ErrnoToStatus(error, "pthread_mutex_init");
}

}  // namespace

Segment::Segment(UniqueFd fd, int size)
    : fd_(std::move(fd)),
      size_(size),
      staging_(RoundUp(4096 + sizeof(MemberRow) * static_cast<size_t>(size))),
      mailboxes_(staging_ + static_cast<size_t>(size) * 2 * kStagingBytes),
      bytes_(mailboxes_ + static_cast<size_t>(size) * size * kMailboxBytes) {}

Segment::~Segment() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

absl::Status Segment::MapAll() {
  void* const base =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (base == MAP_FAILED) return Error("mapping the memory of a group");
  base_ = static_cast<std::byte*>(base);
  return absl::OkStatus();
}

absl::StatusOr<Segment::Pointer> Segment::Make(int size) {
  if (size < 1 || size > kMaxMembers) {
    return absl::InvalidArgumentError(
        absl::StrCat("a host has ", size, " ranks of a group; ", kMaxMembers, " can share memory"));
  }
  UniqueFd fd(::memfd_create("ddp-group", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Error("memfd_create");
  const std::shared_ptr<Segment> segment(new Segment(std::move(fd), size));
  // ftruncate() would raise SIGXFSZ.
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < segment->bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the limit of file sizes (ulimit -f) is ", limit.rlim_cur, " bytes, and ",
                     size, " ranks of a host share ", segment->bytes_, " bytes of memory"));
  }
  if (::ftruncate(segment->fd(), static_cast<off_t>(segment->bytes_)) != 0) {
    return Error("sizing the memory of a group");
  }
  // A member that shrinks the file would end the others by SIGBUS.
  if (::fcntl(segment->fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Error("sealing the memory of a group");
  }
  if (absl::Status status = segment->MapAll(); !status.ok()) return status;
  SegmentHeader* const header = new (segment->base_) SegmentHeader{.magic = kMagic};
  header->size = static_cast<uint32_t>(size);
  for (int member = 0; member < size; ++member) {
    MemberRow* const row = new (&segment->row(member)) MemberRow{};
    if (absl::Status status = InitLife(row->life); !status.ok()) return status;
  }
  return segment;
}

absl::StatusOr<Segment::Pointer> Segment::Map(UniqueFd fd, int size) {
  if (size < 1 || size > kMaxMembers) return absl::InvalidArgumentError("no such group size");
  const std::shared_ptr<Segment> segment(new Segment(std::move(fd), size));
  struct stat file {};
  if (::fstat(segment->fd(), &file) != 0) return Error("fstat");
  const int seals = ::fcntl(segment->fd(), F_GET_SEALS);
  if (static_cast<size_t>(file.st_size) != segment->bytes_ || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("the memory that a peer has sent is not that of a group");
  }
  if (absl::Status status = segment->MapAll(); !status.ok()) return status;
  if (segment->header().magic != kMagic || segment->header().size != static_cast<uint32_t>(size)) {
    return absl::FailedPreconditionError(
        "the memory that a peer has sent is that of another version of this library, or of a "
        "group of another size");
  }
  return segment;
}

std::atomic<uint32_t>& Segment::LifeWord(MemberRow& row) {
  // The lock word is the first field of glibc's pthread_mutex_t. The kernel's ABI needs it there.
  return *reinterpret_cast<std::atomic<uint32_t>*>(&row.life);
}

bool Segment::has_died(int member) const {
  return (LifeWord(row(member)).load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

void Segment::RingAll() const {
  for (int member = 0; member < size_; ++member) {
    std::atomic<uint32_t>& bell = row(member).bell;
    bell.fetch_add(1, std::memory_order_seq_cst);
    FutexWake(bell);
  }
}

void Segment::Prefault(int member) const { std::memset(staging(member, 0), 0, 2 * kStagingBytes); }

}  // namespace ddp::internal
