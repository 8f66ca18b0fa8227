#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_BLOCK_CACHE_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_BLOCK_CACHE_H_

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "testing/accelerator/runtime/stream_place.h"

namespace ddp::testing {

// Decides which bytes of a range a tensor gets, as a caching allocator of a device does.
//
// A block belongs to the stream that it was allocated on. When it is freed, the next allocation of
// its size on the same stream gets it, without any wait: work of one stream runs in order. Other
// streams that use the block must be recorded; the block then rests until their work is done.
//
// Blocks have a power of two of bytes, at least kSmallest, and are neither split nor joined.
// Pure: no memory, no thread. Thread-compatible.
class BlockCache {
 public:
  static constexpr size_t kSmallest = 512;

  struct Block {
    size_t offset = 0;
    size_t bytes = 0;
    StreamPlace owner;
    std::set<StreamPlace> users;  // streams that use it, without its owner
  };

  struct Use {
    size_t allocated = 0;  // bytes of blocks that tensors have
    size_t reserved = 0;   // and of blocks that rest or are free
    size_t most_allocated = 0;
  };

  // Of a range of `size` bytes, at most `limit` of them reserved at a time.
  BlockCache(size_t size, size_t limit) : size_(size), limit_(limit) {}

  // Returns a block of at least `bytes` bytes, which must not be 0, and whether it was used before;
  // nullopt when there is no room.
  std::optional<std::pair<Block, bool>> Allocate(size_t bytes, StreamPlace owner);

  // Returns the block in use that `offset` lies in; null: there is none.
  const Block* Find(size_t offset) const;

  // Records that work of `user` uses the block in use that begins at or before `offset`.
  void RecordUse(size_t offset, StreamPlace user);

  // Ends the use of the block that begins at `offset`. It rests until Reuse(): when the work that
  // its `users` have so far is done.
  Block Free(size_t offset);

  // Makes a resting block free for its owner.
  void Reuse(const Block& block);

  // Forgets the free blocks, and returns them. Their bytes are not allocated again.
  std::vector<Block> ReleaseFree();

  const Use& use() const { return use_; }

 private:
  const size_t size_;
  const size_t limit_;
  std::map<size_t, Block> in_use_;                                     // by offset
  std::map<std::pair<StreamPlace, size_t>, std::vector<Block>> free_;  // by owner and bytes
  size_t end_ = 0;  // of the bytes that were ever allocated
  Use use_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_BLOCK_CACHE_H_
