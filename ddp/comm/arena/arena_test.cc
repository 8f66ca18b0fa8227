#include "ddp/comm/arena/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/status/status.h"

namespace ddp::internal {
namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;
// A size that is no multiple of a page, as most gradients have.
constexpr size_t kOdd = 40 * kKiB + 12;

ArenaDemand Demand(Arena& arena, std::vector<size_t> gradient_bytes, size_t capacity_bytes = 0) {
  auto demand = arena.AddDemand(
      {.gradient_bytes = std::move(gradient_bytes), .capacity_bytes = capacity_bytes});
  EXPECT_TRUE(demand.ok()) << demand.status();
  return *std::move(demand);
}

// The memory that the system holds for the arena's file.
size_t MemoryOf(const Arena& arena) {
  struct stat status;
  EXPECT_EQ(fstat(arena.fd(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

// Runs `child` in a forked child, and returns its result. The test waits for the child's end.
int InChild(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class ArenaTest : public ::testing::Test {
 protected:
  ArenaTest() : arena_(64 * kMiB) { EXPECT_TRUE(arena_.status().ok()) << arena_.status(); }

  uint64_t OffsetOf(const void* block) const {
    return static_cast<const std::byte*>(block) - arena_.base();
  }

  Arena arena_;
};

TEST_F(ArenaTest, OnlySizesOfADemandAreServed) {
  EXPECT_EQ(arena_.Allocate(kOdd), nullptr);
  const ArenaDemand demand = Demand(arena_, {kOdd, 16 * kKiB, 100});
  EXPECT_EQ(arena_.Allocate(kOdd + 1), nullptr);
  EXPECT_EQ(arena_.Allocate(kOdd - 1), nullptr);
  EXPECT_EQ(arena_.Allocate(100), nullptr) << "smaller than the smallest block";
  EXPECT_EQ(arena_.Allocate(0), nullptr);
  void* const odd = arena_.Allocate(kOdd);
  void* const small = arena_.Allocate(16 * kKiB);
  ASSERT_NE(odd, nullptr);
  ASSERT_NE(small, nullptr);
  std::memset(odd, 1, kOdd);
  std::memset(small, 2, 16 * kKiB);
  EXPECT_EQ(static_cast<std::byte*>(odd)[kOdd - 1], std::byte{1});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(odd) % 4096, 0);
  EXPECT_EQ(arena_.statistics().refusals, 0) << "a size that is not served is no refusal";
  arena_.Free(odd);
  arena_.Free(small);
  arena_.Free(nullptr);
}

TEST_F(ArenaTest, TheBlockFreedLastIsServedFirst) {
  const ArenaDemand demand = Demand(arena_, {kOdd, kOdd});
  void* const first = arena_.Allocate(kOdd);
  void* const second = arena_.Allocate(kOdd);
  EXPECT_NE(first, second);
  arena_.Free(first);
  arena_.Free(second);
  EXPECT_EQ(arena_.Allocate(kOdd), second);
  EXPECT_EQ(arena_.Allocate(kOdd), first);
  arena_.Free(first);
  arena_.Free(second);
}

TEST_F(ArenaTest, TheCapacityIsTwiceTheGradientsOrTheOption) {
  std::vector<void*> blocks;
  const auto allocate_all = [&] {
    while (void* const block = arena_.Allocate(64 * kKiB)) blocks.push_back(block);
    return blocks.size();
  };
  {
    const ArenaDemand demand = Demand(arena_, {64 * kKiB, 64 * kKiB, 64 * kKiB});
    EXPECT_EQ(arena_.statistics().capacity, 6 * 64 * kKiB);
    EXPECT_EQ(allocate_all(), 6);
    EXPECT_EQ(arena_.statistics().refusals, 1);
    {
      const ArenaDemand more = Demand(arena_, {64 * kKiB}, 10 * 64 * kKiB);
      EXPECT_EQ(arena_.statistics().capacity, 16 * 64 * kKiB);
      EXPECT_EQ(allocate_all(), 16);
      const ArenaDemand less = Demand(arena_, {64 * kKiB}, 1);
      EXPECT_EQ(arena_.statistics().capacity, 16 * 64 * kKiB + 1);
      EXPECT_EQ(arena_.statistics().bytes_touched, 16 * 64 * kKiB) << "no room for its gradient";
    }
    EXPECT_EQ(arena_.Allocate(64 * kKiB), nullptr);
  }
  EXPECT_EQ(std::set<void*>(blocks.begin(), blocks.end()).size(), 16);
  for (void* const block : blocks) arena_.Free(block);
  EXPECT_EQ(arena_.statistics().capacity, 0);
  EXPECT_EQ(arena_.statistics().bytes_touched, 0);
}

TEST_F(ArenaTest, ADemandMakesItsMemoryPresentAndGivesItBack) {
  EXPECT_EQ(MemoryOf(arena_), 0) << "a reservation costs nothing";
  {
    const ArenaDemand demand = Demand(arena_, {kMiB, kOdd, kMiB, kOdd});
    const size_t sum = 2 * kMiB + 2 * 44 * kKiB;
    EXPECT_EQ(MemoryOf(arena_), sum);
    EXPECT_EQ(arena_.statistics().bytes_touched, sum);
    EXPECT_EQ(arena_.statistics().bytes_in_use, 0);
    std::array<unsigned char, (2 * kMiB + 88 * kKiB) / 4096> present;
    ASSERT_EQ(mincore(arena_.base(), sum, present.data()), 0);
    EXPECT_EQ(std::count_if(present.begin(), present.end(), [](int page) { return page & 1; }),
              static_cast<ptrdiff_t>(present.size()));
    void* const block = arena_.Allocate(kMiB);
    EXPECT_EQ(arena_.statistics().bytes_in_use, kMiB);
    EXPECT_EQ(arena_.statistics().bytes_touched, sum) << "the block was present";
    arena_.Free(block);
    EXPECT_EQ(MemoryOf(arena_), sum) << "a free block of a served size keeps its memory";
  }
  EXPECT_EQ(MemoryOf(arena_), 0);
  EXPECT_EQ(arena_.statistics().bytes_touched, 0);
}

TEST_F(ArenaTest, ABlockMayOutliveItsDemand) {
  void* block;
  {
    const ArenaDemand demand = Demand(arena_, {kMiB, kMiB});
    block = arena_.Allocate(kMiB);
  }
  EXPECT_EQ(MemoryOf(arena_), kMiB);
  std::memset(block, 7, kMiB);
  EXPECT_EQ(arena_.BlockAt(block, kMiB), OffsetOf(block));
  EXPECT_EQ(arena_.Allocate(kMiB), nullptr);
  arena_.Free(block);
  EXPECT_EQ(MemoryOf(arena_), 0);
  const ArenaDemand demand = Demand(arena_, {kMiB});
  EXPECT_EQ(static_cast<std::byte*>(arena_.Allocate(kMiB))[5], std::byte{0}) << "new memory";
}

TEST_F(ArenaTest, ABlockBeyondALoweredCapacityIsReleasedWhenFreed) {
  const ArenaDemand kept = Demand(arena_, {kMiB});
  std::vector<void*> blocks;
  {
    const ArenaDemand demand = Demand(arena_, {kMiB}, 4 * kMiB);
    for (int i = 0; i < 6; ++i) blocks.push_back(arena_.Allocate(kMiB));
    EXPECT_EQ(std::count(blocks.begin(), blocks.end(), nullptr), 0);
  }
  EXPECT_EQ(arena_.statistics().bytes_touched, 6 * kMiB);
  for (void* const block : blocks) arena_.Free(block);
  EXPECT_EQ(arena_.statistics().bytes_touched, 2 * kMiB);
}

TEST(ArenaReuseTest, AddressesAndSizesAreUsedAgain) {
  // Models of ever other sizes, one after the other. Each fills half of the addresses.
  Arena arena(256 * kKiB);
  for (size_t i = 0; i < 5000; ++i) {
    const size_t bytes = 120 * kKiB + i;
    const ArenaDemand demand = Demand(arena, {bytes});
    void* const block = arena.Allocate(bytes);
    ASSERT_NE(block, nullptr) << i;
    arena.Free(block);
  }
}

TEST_F(ArenaTest, AThousandSizesAreServed) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < 1000; ++i) sizes.push_back(Arena::kSmallestBlock + 4 * i);
  const ArenaDemand demand = Demand(arena_, sizes);
  for (const size_t bytes : sizes) {
    void* const block = arena_.Allocate(bytes);
    ASSERT_NE(block, nullptr) << bytes;
    arena_.Free(block);
  }
}

TEST_F(ArenaTest, ABlockMayHaveADemandOfItsOwn) {
  {
    const auto block = arena_.AllocateAlone(kOdd);
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_TRUE(arena_.BlockAt(block->get(), kOdd).has_value());
    EXPECT_EQ(arena_.statistics().capacity, kOdd);
    const auto small = arena_.AllocateAlone(1);
    ASSERT_TRUE(small.ok()) << small.status();
    EXPECT_FALSE(arena_.AllocateAlone(128 * kMiB).ok());
  }
  EXPECT_EQ(arena_.statistics().capacity, 0);
  EXPECT_EQ(MemoryOf(arena_), 0);
}

TEST_F(ArenaTest, ABlockIsFoundByItsStartAndExactSize) {
  const ArenaDemand demand = Demand(arena_, {kOdd, kOdd, kMiB});
  std::byte* const first = static_cast<std::byte*>(arena_.Allocate(kOdd));
  std::byte* const second = static_cast<std::byte*>(arena_.Allocate(kOdd));
  EXPECT_EQ(arena_.BlockAt(first, kOdd), OffsetOf(first));
  EXPECT_EQ(arena_.BlockAt(second, kOdd), OffsetOf(second));
  EXPECT_EQ(arena_.BlockAt(first, kOdd - 4), std::nullopt);
  EXPECT_EQ(arena_.BlockAt(first, kOdd + 4), std::nullopt);
  EXPECT_EQ(arena_.BlockAt(first, 44 * kKiB), std::nullopt) << "the rounded size";
  EXPECT_EQ(arena_.BlockAt(first, 0), std::nullopt);
  EXPECT_EQ(arena_.BlockAt(first + 64, kOdd), std::nullopt);
  EXPECT_EQ(arena_.BlockAt(first + 4096, kOdd), std::nullopt);
  EXPECT_EQ(arena_.BlockAt(arena_.base() + 32 * kMiB, kOdd), std::nullopt) << "never used";
  int elsewhere;
  EXPECT_EQ(arena_.BlockAt(&elsewhere, kOdd), std::nullopt);
  EXPECT_EQ(arena_.BlockAt(nullptr, kOdd), std::nullopt);
  arena_.Free(first);
  EXPECT_EQ(arena_.BlockAt(first, kOdd), std::nullopt) << "freed";
  EXPECT_EQ(arena_.BlockAt(second, kOdd), OffsetOf(second));
  arena_.Free(second);
}

TEST_F(ArenaTest, ContainsTakesTheWholeRangeIntoAccount) {
  std::byte* const end = arena_.base() + arena_.reservation();
  EXPECT_TRUE(arena_.Contains(arena_.base(), arena_.reservation()));
  EXPECT_TRUE(arena_.Contains(end - 1, 1));
  EXPECT_FALSE(arena_.Contains(end - 1, 2));
  EXPECT_FALSE(arena_.Contains(end, 0));
  EXPECT_FALSE(arena_.Contains(arena_.base() - 1, 1));
  EXPECT_FALSE(arena_.Contains(arena_.base(), SIZE_MAX));
  EXPECT_FALSE(arena_.Contains(nullptr, 1));
}

TEST_F(ArenaTest, ABlockIsClaimedOnceInAPass) {
  const ArenaDemand demand = Demand(arena_, {kOdd, kOdd});
  void* const first = arena_.Allocate(kOdd);
  void* const second = arena_.Allocate(kOdd);
  EXPECT_TRUE(arena_.Claim(OffsetOf(first), 1));
  EXPECT_FALSE(arena_.Claim(OffsetOf(first), 1));
  EXPECT_TRUE(arena_.Claim(OffsetOf(second), 1));
  EXPECT_TRUE(arena_.Claim(OffsetOf(first), 2));
  EXPECT_FALSE(arena_.Claim(OffsetOf(first), 2));
  arena_.Free(first);
  EXPECT_EQ(arena_.Allocate(kOdd), first);
  EXPECT_TRUE(arena_.Claim(OffsetOf(first), 2)) << "another tensor";
  arena_.Free(first);
  arena_.Free(second);
}

TEST_F(ArenaTest, ThreadsAllocateAndFreeForEachOther) {
  constexpr int kThreads = 4;
  constexpr std::array<size_t, 3> kSizes = {16 * kKiB, kOdd, 128 * kKiB};
  const ArenaDemand demand = Demand(arena_, {kSizes.begin(), kSizes.end()}, 4 * kMiB);
  struct Block {
    uint32_t* words;
    size_t bytes;
    uint32_t mark;
  };
  std::array<std::vector<Block>, kThreads> held;
  // Each round, a thread checks and frees the blocks that its neighbour allocated in the last one.
  for (uint32_t round = 0; round < 20; ++round) {
    std::vector<std::thread> threads;
    std::array<std::vector<Block>, kThreads> next;
    for (uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (const Block& block : held[(t + 1) % kThreads]) {
          EXPECT_EQ(block.words[0], block.mark);
          EXPECT_EQ(block.words[block.bytes / 4 - 1], block.mark);
          EXPECT_TRUE(arena_.BlockAt(block.words, block.bytes).has_value());
          arena_.Free(block.words);
        }
        for (uint32_t i = 0; i < 60; ++i) {
          const size_t bytes = kSizes[i % kSizes.size()];
          auto* const words = static_cast<uint32_t*>(arena_.Allocate(bytes));
          if (words == nullptr) continue;
          const uint32_t mark = round << 16 | t << 8 | i;
          words[0] = words[bytes / 4 - 1] = mark;
          next[t].push_back({.words = words, .bytes = bytes, .mark = mark});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_FALSE(std::all_of(next.begin(), next.end(), [](const auto& n) { return n.empty(); }));
    held = std::move(next);
  }
  for (const auto& blocks : held) {
    for (const Block& block : blocks) arena_.Free(block.words);
  }
  EXPECT_EQ(arena_.statistics().bytes_in_use, 0);
}

TEST_F(ArenaTest, RandomUseKeepsTheBooks) {
  std::mt19937 random(11);
  std::vector<ArenaDemand> demands;
  std::vector<std::pair<unsigned char*, size_t>> blocks;
  const auto size = [&] { return 16 * kKiB + (random() % 40) * 1000; };
  for (int i = 0; i < 20'000; ++i) {
    switch (random() % 8) {
      case 0:
        if (demands.size() < 10) demands.push_back(Demand(arena_, {size(), size(), size()}));
        break;
      case 1:
        if (!demands.empty()) demands.erase(demands.begin() + random() % demands.size());
        break;
      case 2:
      case 3:
        if (!blocks.empty()) {
          std::swap(blocks[random() % blocks.size()], blocks.back());
          const auto [block, bytes] = blocks.back();
          blocks.pop_back();
          ASSERT_EQ(block[0], block[bytes - 1]);
          arena_.Free(block);
        }
        break;
      default: {
        const size_t bytes = size();
        if (auto* const block = static_cast<unsigned char*>(arena_.Allocate(bytes))) {
          block[0] = block[bytes - 1] = static_cast<unsigned char>(random());
          blocks.emplace_back(block, bytes);
        }
      }
    }
    const Arena::Statistics statistics = arena_.statistics();
    ASSERT_LE(statistics.bytes_in_use, statistics.bytes_touched);
    if (blocks.empty()) {
      ASSERT_LE(statistics.bytes_touched, statistics.capacity);
    }
  }
  demands.clear();
  for (const auto& [block, bytes] : blocks) arena_.Free(block);
  EXPECT_EQ(arena_.statistics().bytes_in_use, 0);
  EXPECT_EQ(arena_.statistics().bytes_touched, 0);
  EXPECT_EQ(arena_.statistics().capacity, 0);
  EXPECT_EQ(MemoryOf(arena_), 0);
}

TEST_F(ArenaTest, AForkedChildHasAPrivateCopy) {
  const ArenaDemand demand = Demand(arena_, {kMiB, kMiB});
  auto* const block = static_cast<unsigned char*>(arena_.Allocate(kMiB));
  void* const other = arena_.Allocate(kMiB);
  std::memset(block, 1, kMiB);
  int written[2], checked[2];
  ASSERT_EQ(pipe(written), 0);
  ASSERT_EQ(pipe(checked), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    char byte = 0;
    if (block[kMiB - 1] != 1) _exit(1);
    std::memset(block, 2, kMiB);
    if (write(written[1], &byte, 1) != 1 || read(checked[0], &byte, 1) != 1) _exit(2);
    if (block[0] != 2 || block[kMiB - 1] != 2) _exit(3);  // the parent writes 3
    if (arena_.Allocate(kMiB) != nullptr) _exit(4);
    if (arena_.BlockAt(block, kMiB).has_value()) _exit(5);
    if (!arena_.Contains(block, kMiB)) _exit(6);
    arena_.Free(block);
    if (arena_.AddDemand({.gradient_bytes = {kMiB}}).status().code() !=
        absl::StatusCode::kFailedPrecondition) {
      _exit(7);
    }
    { Arena own(kMiB); }
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(written[0], &byte, 1), 1);
  EXPECT_EQ(block[0], 1) << "the child wrote into the parent's memory";
  EXPECT_EQ(std::count(block, block + kMiB, 1), static_cast<ptrdiff_t>(kMiB));
  block[0] = block[kMiB - 1] = 3;
  ASSERT_EQ(write(checked[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (const int fd : {written[0], written[1], checked[0], checked[1]}) close(fd);
  EXPECT_EQ(arena_.BlockAt(block, kMiB), OffsetOf(block)) << "the child freed only its copy";
  arena_.Free(block);
  EXPECT_EQ(arena_.Allocate(kMiB), block);
  arena_.Free(block);
  arena_.Free(other);
}

// A child that ends normally destroys the demands and blocks that it has inherited.
TEST_F(ArenaTest, AForkedChildWithdrawsNothing) {
  auto demand = std::make_unique<ArenaDemand>(Demand(arena_, {kMiB, kMiB}));
  auto* const block = static_cast<unsigned char*>(arena_.Allocate(kMiB));
  block[0] = 1;
  EXPECT_EQ(InChild([&] {
              demand.reset();
              return 0;
            }),
            0);
  EXPECT_EQ(block[0], 1);
  EXPECT_EQ(MemoryOf(arena_), 2 * kMiB);
  arena_.Free(block);
}

TEST_F(ArenaTest, AForkWhileOtherThreadsAllocateIsSafe) {
  const ArenaDemand demand = Demand(arena_, {kOdd, kMiB});
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    while (!stop) {
      const ArenaDemand more = Demand(arena_, {kOdd, 32 * kKiB});
      arena_.Free(arena_.Allocate(32 * kKiB));
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(InChild([&] { return arena_.Allocate(kOdd) == nullptr ? 0 : 1; }), 0);
  }
  stop = true;
  thread.join();
}

TEST_F(ArenaTest, ABlockThatOutlivesItsDemandTakesNoRoom) {
  std::vector<void*> kept;
  for (int i = 0; i < 100; ++i) {
    const ArenaDemand demand = Demand(arena_, {kMiB / 4});
    kept.push_back(arena_.Allocate(kMiB / 4));
    ASSERT_NE(kept.back(), nullptr) << i;
    void* const second = arena_.Allocate(kMiB / 4);
    ASSERT_NE(second, nullptr) << i;
    arena_.Free(second);
  }
  EXPECT_EQ(arena_.statistics().outliving, 25 * kMiB);
  for (void* const block : kept) arena_.Free(block);
  EXPECT_EQ(arena_.statistics().outliving, 0);
  EXPECT_EQ(arena_.statistics().bytes_touched, 0);
  EXPECT_EQ(MemoryOf(arena_), 0);
}

TEST_F(ArenaTest, TheDescriptorIsSealedAndClosedOnExec) {
  EXPECT_NE(fcntl(arena_.fd(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(ftruncate(arena_.fd(), 4096), 0) << "a peer could make this process fault";
  struct stat status;
  ASSERT_EQ(fstat(arena_.fd(), &status), 0);
  EXPECT_EQ(static_cast<size_t>(status.st_size), arena_.reservation());
}

TEST(ArenaOfProcessTest, IsOneAndLarge) {
  Arena& arena = Arena::OfProcess();
  EXPECT_EQ(&arena, &Arena::OfProcess());
  ASSERT_TRUE(arena.status().ok()) << arena.status();
  EXPECT_GE(arena.reservation(), 64 * kMiB);
  const ArenaDemand demand = Demand(arena, {kOdd});
  void* const block = arena.Allocate(kOdd);
  EXPECT_TRUE(arena.BlockAt(block, kOdd).has_value());
  arena.Free(block);
}

using ArenaDeathTest = ArenaTest;

TEST_F(ArenaDeathTest, OnlyAnAllocatedBlockIsFreed) {
  const ArenaDemand demand = Demand(arena_, {kOdd});
  std::byte* const block = static_cast<std::byte*>(arena_.Allocate(kOdd));
  int local;
  arena_.Free(block);
  // The child of a death test is forked, and a forked child frees nothing. So the child makes its
  // own arena.
  EXPECT_DEATH(
      {
        Arena arena(kMiB);
        arena.Free(&local);
      },
      "an address of no block");
  EXPECT_DEATH(
      {
        Arena arena(8 * kMiB);
        const ArenaDemand own = Demand(arena, {kOdd});
        void* const twice = arena.Allocate(kOdd);
        arena.Free(twice);
        arena.Free(twice);
      },
      "no block is allocated");
}

}  // namespace
}  // namespace ddp::internal
