#include "testing/accelerator/runtime/block_cache.h"

#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

constexpr StreamPlace kFirst{.stream = 0};
constexpr StreamPlace kSecond{.stream = 1};

size_t OffsetOfNew(BlockCache& cache, size_t bytes, StreamPlace owner) {
  return cache.Allocate(bytes, owner)->first.offset;
}

TEST(BlockCacheTest, TheSameStreamGetsAFreedBlockOfItsSize) {
  BlockCache cache(1 << 20, 1 << 20);
  const size_t offset = OffsetOfNew(cache, 700, kFirst);
  cache.Reuse(cache.Free(offset));
  EXPECT_NE(OffsetOfNew(cache, 700, kSecond), offset);
  EXPECT_NE(OffsetOfNew(cache, 3000, kFirst), offset);
  EXPECT_EQ(OffsetOfNew(cache, 1024, kFirst), offset);
}

TEST(BlockCacheTest, ABlockRestsUntilItsReuse) {
  BlockCache cache(1 << 20, 1 << 20);
  const size_t offset = OffsetOfNew(cache, 1, kFirst);
  cache.RecordUse(offset + 100, kSecond);
  cache.RecordUse(offset, kFirst);  // its owner's work needs no record
  const BlockCache::Block block = cache.Free(offset);
  EXPECT_EQ(block.users, std::set<StreamPlace>{kSecond});
  EXPECT_NE(OffsetOfNew(cache, 1, kFirst), offset);
  cache.Reuse(block);
  EXPECT_EQ(OffsetOfNew(cache, 1, kFirst), offset);
  EXPECT_TRUE(cache.Find(offset)->users.empty());
}

TEST(BlockCacheTest, FindsTheBlockAroundAnAddress) {
  BlockCache cache(1 << 20, 1 << 20);
  const size_t offset = OffsetOfNew(cache, 1000, kFirst);
  EXPECT_EQ(cache.Find(offset + 1023)->offset, offset);
  EXPECT_EQ(cache.Find(offset + 1024), nullptr);
  (void)cache.Free(offset);
  EXPECT_EQ(cache.Find(offset), nullptr);
}

TEST(BlockCacheTest, ReservesNoMoreThanItsLimit) {
  BlockCache cache(1 << 20, 2048);
  const size_t offset = OffsetOfNew(cache, 1024, kFirst);
  (void)OffsetOfNew(cache, 1024, kFirst);
  cache.Reuse(cache.Free(offset));
  EXPECT_FALSE(cache.Allocate(512, kFirst).has_value());
  EXPECT_EQ(cache.ReleaseFree().size(), 1);
  EXPECT_TRUE(cache.Allocate(512, kFirst).has_value());
  EXPECT_EQ(cache.use().allocated, 1536);
  EXPECT_EQ(cache.use().reserved, 1536);
  EXPECT_EQ(cache.use().most_allocated, 2048);
  EXPECT_FALSE(cache.Allocate(1 << 30, kFirst).has_value());
}

}  // namespace
}  // namespace ddp::testing
