#include "elastic/worker/kept_memory.h"

#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/under_sanitizer.h"
#include "gtest/gtest.h"

namespace ddp::elastic::internal {
namespace {

VariableGetter Environment(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

TEST(KeptMemoryTest, TheUsersOwnSettingsStay) {
  EXPECT_EQ(ReasonToLeaveMalloc(Environment({})), "");
  EXPECT_EQ(ReasonToLeaveMalloc(Environment({{"DDP_KEEP_FREED_MEMORY", "1"}})), "");
  EXPECT_EQ(ReasonToLeaveMalloc(Environment({{"DDP_KEEP_FREED_MEMORY", "0"}})),
            "DDP_KEEP_FREED_MEMORY=0");
  EXPECT_EQ(ReasonToLeaveMalloc(Environment({{"MALLOC_TRIM_THRESHOLD_", "131072"}})),
            "MALLOC_TRIM_THRESHOLD_ is set");
  EXPECT_EQ(ReasonToLeaveMalloc(Environment({{"GLIBC_TUNABLES", "glibc.malloc.mmap_max=7"}})),
            "GLIBC_TUNABLES sets glibc.malloc.mmap_max");
  EXPECT_EQ(ReasonToLeaveMalloc(Environment({{"GLIBC_TUNABLES", "glibc.malloc.arena_max=1"}})), "");
  EXPECT_FALSE(KeepFreedMemory(Environment({{"MALLOC_MMAP_MAX_", "65536"}})));
}

int64_t MinorFaults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// Allocates and frees what a backward does: many blocks of 2 MiB, and one that exceeds the largest
// mmap threshold of glibc.
void Step() {
  std::vector<void*> blocks;
  for (int i = 0; i < 9; ++i) {
    const size_t bytes = i == 0 ? size_t{40} << 20 : size_t{2} << 20;
    blocks.push_back(std::malloc(bytes));
    ASSERT_NE(blocks.back(), nullptr);
    std::memset(blocks.back(), i, bytes);
  }
  for (void* block : blocks) std::free(block);
}

TEST(KeptMemoryTest, AStepAfterTheFirstOnesFaultsOnNoPage) {
  if (kUnderSanitizer) GTEST_SKIP() << "a sanitizer has its own malloc";
#if !defined(__GLIBC__)
  GTEST_SKIP() << "not glibc";
#endif
  ASSERT_TRUE(KeepFreedMemory(Environment({})));
  Step();
  Step();
  const int64_t before = MinorFaults();
  Step();
  // The step touches 14,336 pages.
  EXPECT_LT(MinorFaults() - before, 200);
}

TEST(KeptMemoryTest, LargeBlocksOfOtherThreadsAreServedToo) {
  KeepFreedMemory(Environment({}));
  std::thread(&Step).join();
}

}  // namespace
}  // namespace ddp::elastic::internal
