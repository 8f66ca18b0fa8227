#include "testing/accelerator/runtime/block_cache.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "glog/logging.h"

namespace ddp::testing {

std::optional<std::pair<BlockCache::Block, bool>> BlockCache::Allocate(size_t bytes,
                                                                       StreamPlace owner) {
  if (bytes > size_) return std::nullopt;
  const size_t rounded = std::bit_ceil(std::max(bytes, kSmallest));
  std::vector<Block>& free = free_[{owner, rounded}];
  const bool reused = !free.empty();
  Block block{.offset = end_, .bytes = rounded, .owner = owner};
  if (reused) {
    block = free.back();
    free.pop_back();
  } else {
    if (rounded > size_ - end_ || use_.reserved + rounded > limit_) return std::nullopt;
    end_ += rounded;
    use_.reserved += rounded;
  }
  use_.allocated += rounded;
  use_.most_allocated = std::max(use_.most_allocated, use_.allocated);
  in_use_[block.offset] = block;
  return std::pair(block, reused);
}

const BlockCache::Block* BlockCache::Find(size_t offset) const {
  const auto after = in_use_.upper_bound(offset);
  if (after == in_use_.begin()) return nullptr;
  const Block& block = std::prev(after)->second;
  return offset < block.offset + block.bytes ? &block : nullptr;
}

void BlockCache::RecordUse(size_t offset, StreamPlace user) {
  const Block* block = Find(offset);
  CHECK(block != nullptr) << "no block at " << offset;
  if (user != block->owner) in_use_[block->offset].users.insert(user);
}

BlockCache::Block BlockCache::Free(size_t offset) {
  const auto it = in_use_.find(offset);
  CHECK(it != in_use_.end()) << "no block begins at " << offset;
  Block block = it->second;
  in_use_.erase(it);
  use_.allocated -= block.bytes;
  return block;
}

void BlockCache::Reuse(const Block& block) {
  free_[{block.owner, block.bytes}].push_back(
      {.offset = block.offset, .bytes = block.bytes, .owner = block.owner});
}

std::vector<BlockCache::Block> BlockCache::ReleaseFree() {
  std::vector<Block> released;
  for (auto& [key, blocks] : free_) {
    for (const Block& block : blocks) use_.reserved -= block.bytes;
    released.insert(released.end(), blocks.begin(), blocks.end());
  }
  free_.clear();
  return released;
}

}  // namespace ddp::testing
