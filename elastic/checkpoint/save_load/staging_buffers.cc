#include "elastic/checkpoint/save_load/staging_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

// Anonymous memory with its pages touched. Move-only.
class Memory {
 public:
  Memory() = default;
  Memory(void* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (data_ != nullptr) (void)munmap(data_, bytes_);
  }

  static absl::StatusOr<Memory> Allocate(uint64_t bytes) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data != MAP_FAILED) return Memory(data, bytes);
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a staged copy of ", bytes, " bytes: ", strerror(errno)));
  }

  char* data() const { return static_cast<char*>(data_); }
  uint64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace

struct StagingBuffers::Lease::Pool {
  struct Buffer {
    Memory memory;  // used by the lease's holder without the lock
    bool in_use = false;
  };
  Mutex mutex;
  std::vector<Buffer> buffers;  // `in_use` is guarded by the mutex; their number is constant
};

StagingBuffers::Lease::Lease(Lease&& other) noexcept
    : pool_(std::move(other.pool_)), index_(other.index_) {}

StagingBuffers::Lease::~Lease() {
  if (pool_ == nullptr) return;
  MutexLock lock(pool_->mutex);
  pool_->buffers[index_].in_use = false;
}

char* StagingBuffers::Lease::data() const { return pool_->buffers[index_].memory.data(); }

StagingBuffers::StagingBuffers(int count) : pool_(std::make_shared<Lease::Pool>()) {
  CHECK_GE(count, 1);
  pool_->buffers.resize(static_cast<size_t>(count));
}

StagingBuffers::~StagingBuffers() = default;

bool StagingBuffers::HasFree() const {
  MutexLock lock(pool_->mutex);
  return std::any_of(pool_->buffers.begin(), pool_->buffers.end(),
                     [](const Lease::Pool::Buffer& buffer) { return !buffer.in_use; });
}

absl::StatusOr<StagingBuffers::Lease> StagingBuffers::Take(uint64_t bytes) {
  size_t index = 0;
  {
    MutexLock lock(pool_->mutex);
    // The largest free one, so that a second buffer is allocated only for a second save.
    std::optional<size_t> best;
    for (size_t i = 0; i < pool_->buffers.size(); ++i) {
      const Lease::Pool::Buffer& buffer = pool_->buffers[i];
      if (buffer.in_use) continue;
      if (!best || buffer.memory.bytes() > pool_->buffers[*best].memory.bytes()) best = i;
    }
    CHECK(best.has_value()) << "no staging buffer is free";
    index = *best;
    pool_->buffers[index].in_use = true;
  }
  Lease lease(pool_, index);
  Memory& memory = pool_->buffers[index].memory;
  if (memory.bytes() < bytes) {
    memory = Memory();  // first, so that both need not fit
    absl::StatusOr<Memory> larger = Memory::Allocate(bytes);
    if (!larger.ok()) return larger.status();
    memory = *std::move(larger);
  }
  return lease;
}

}  // namespace ddp::elastic
