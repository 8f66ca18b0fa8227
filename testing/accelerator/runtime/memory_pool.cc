#include "testing/accelerator/runtime/memory_pool.h"

#include <cstring>
#include <set>
#include <utility>

namespace ddp::testing {
namespace {

// Addresses cost nothing, so that released blocks need not be found again.
constexpr size_t kAddresses = size_t{1} << 38;
constexpr int kPoison = 0xff;
// No stream owns pinned memory: each stream that uses it is recorded.
constexpr StreamPlace kHost{.device = -1};

}  // namespace

MemoryPool::MemoryPool(const Options& options, StreamAt stream_at)
    : options_(options),
      stream_at_(std::move(stream_at)),
      memory_(kAddresses, options.kind),
      blocks_(kAddresses, options.limit) {}

void* MemoryPool::Allocate(size_t bytes, StreamPlace owner) {
  if (options_.kind == DoubleMapping::Kind::kPinned) owner = kHost;
  std::optional<size_t> offset = TryAllocate(bytes, owner);
  if (!offset) {
    ReleaseFree();
    offset = TryAllocate(bytes, owner);
  }
  return offset ? memory_.Address(*offset) : nullptr;
}

std::optional<size_t> MemoryPool::TryAllocate(size_t bytes, StreamPlace owner) {
  MutexLock lock(mutex_);
  ReuseRested();
  const auto allocated = blocks_.Allocate(bytes, owner);
  if (!allocated) return std::nullopt;
  const auto& [block, reused] = *allocated;
  if (!reused && options_.poison) {
    std::memset(memory_.KernelView(block.offset), kPoison, block.bytes);
  }
  return block.offset;
}

void MemoryPool::Free(void* pointer) {
  MutexLock lock(mutex_);
  const BlockCache::Block block = blocks_.Free(memory_.OffsetOf(pointer));
  if (block.users.empty()) {
    PoisonAndReuse(block);
    return;
  }
  Resting resting{.block = block};
  for (const StreamPlace& user : block.users) {
    resting.users.push_back(stream_at_(user).Record());
  }
  resting_.push_back(std::move(resting));
}

void MemoryPool::RecordUse(const void* pointer, StreamPlace user) {
  MutexLock lock(mutex_);
  blocks_.RecordUse(memory_.OffsetOf(pointer), user);
}

void MemoryPool::ReleaseFree() {
  std::vector<std::shared_ptr<Completion>> users;
  {
    MutexLock lock(mutex_);
    for (const Resting& resting : resting_) {
      users.insert(users.end(), resting.users.begin(), resting.users.end());
    }
  }
  // Without the lock: a task may free memory.
  for (const std::shared_ptr<Completion>& user : users) {
    user->Hurry();
    user->Wait();
  }
  std::vector<BlockCache::Block> released;
  {
    MutexLock lock(mutex_);
    ReuseRested();
    released = blocks_.ReleaseFree();
  }
  std::set<StreamPlace> owners;
  for (const BlockCache::Block& block : released) owners.insert(block.owner);
  owners.erase(kHost);
  for (const StreamPlace& owner : owners) stream_at_(owner).Synchronize();
  for (const BlockCache::Block& block : released) memory_.Discard(block.offset, block.bytes);
}

BlockCache::Use MemoryPool::use() const {
  MutexLock lock(mutex_);
  return blocks_.use();
}

void MemoryPool::ReuseRested() {
  std::erase_if(resting_, [this](const Resting& resting) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const std::shared_ptr<Completion>& user : resting.users) {
      if (!user->done()) return false;
    }
    PoisonAndReuse(resting.block);
    return true;
  });
}

void MemoryPool::PoisonAndReuse(const BlockCache::Block& block) {
  if (options_.poison) {
    void* memory = memory_.KernelView(block.offset);
    const size_t bytes = block.bytes;
    if (block.owner == kHost) {
      std::memset(memory, kPoison, bytes);
    } else {
      stream_at_(block.owner).LaunchPrompt([memory, bytes] {
        std::memset(memory, kPoison, bytes);
      });
    }
  }
  blocks_.Reuse(block);
}

}  // namespace ddp::testing
