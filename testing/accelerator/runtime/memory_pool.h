#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_MEMORY_POOL_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_MEMORY_POOL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "testing/accelerator/runtime/block_cache.h"
#include "testing/accelerator/runtime/completion.h"
#include "testing/accelerator/runtime/double_mapping.h"
#include "testing/accelerator/runtime/stream.h"
#include "testing/accelerator/runtime/stream_place.h"

namespace ddp::testing {

// The memory of a device, or the pinned memory of the host: a BlockCache and the bytes.
//
// Freed memory is filled with NaN (bytes 0xff) when it may be given away again. On a device a task
// of the stream that owns it does that, so a kernel of another stream that still reads it sees NaN.
// Thread-safe.
class MemoryPool {
 public:
  struct Options {
    DoubleMapping::Kind kind = DoubleMapping::Kind::kDevice;
    size_t limit = 0;  // of the bytes reserved
    bool poison = true;
  };
  using StreamAt = std::function<Stream&(StreamPlace)>;

  MemoryPool(const Options& options, StreamAt stream_at);

  // Returns the first address of at least `bytes` bytes, which must not be 0; null: out of memory,
  // also after the pool has waited for resting blocks and released the free ones. `owner`: of
  // device memory.
  void* Allocate(size_t bytes, StreamPlace owner = {});

  // Requires: `pointer` was returned by Allocate().
  void Free(void* pointer);

  // Whether `pointer` lies in the pool's memory.
  bool Contains(const void* pointer) const { return memory_.Contains(pointer); }
  // Returns the second address of `pointer`. Requires: Contains(pointer).
  void* KernelView(const void* pointer) const {
    return memory_.KernelView(memory_.OffsetOf(pointer));
  }

  // Records that the work of `user` so far and until Free() uses the block of `pointer`.
  void RecordUse(const void* pointer, StreamPlace user);

  // Waits for resting blocks, and gives the free ones back.
  void ReleaseFree();

  BlockCache::Use use() const;

 private:
  struct Resting {
    BlockCache::Block block;
    std::vector<std::shared_ptr<Completion>> users;
  };

  std::optional<size_t> TryAllocate(size_t bytes, StreamPlace owner);
  void ReuseRested() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PoisonAndReuse(const BlockCache::Block& block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const StreamAt stream_at_;
  DoubleMapping memory_;

  mutable Mutex mutex_;
  BlockCache blocks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Resting> resting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_MEMORY_POOL_H_
