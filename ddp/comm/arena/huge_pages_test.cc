#include "ddp/comm/arena/huge_pages.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "base/unique_fd.h"

namespace ddp::internal {
namespace {

constexpr size_t kSize = 4 * kHugePage;

UniqueFd MakeFile(size_t bytes) {
  UniqueFd fd(memfd_create("huge-pages-test", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

// Returns the bytes of the mapping at `address` that are mapped in huge pages.
size_t HugeBytes(const void* address) {
  std::ostringstream start;
  start << std::hex << reinterpret_cast<uintptr_t>(address) << '-';
  std::ifstream maps("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with(start.str())) found = true;
    if (found && line.starts_with("ShmemPmdMapped:")) return std::stoull(line.substr(15)) * 1024;
  }
  return 0;
}

size_t FileBytes(const UniqueFd& fd) {
  struct stat status;
  EXPECT_EQ(fstat(fd.get(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

TEST(HugePagesTest, AMappingIsAlignedAndShared) {
  const UniqueFd fd = MakeFile(kSize);
  auto* const one = static_cast<char*>(MapSharedAligned(fd.get(), kSize));
  auto* const two = static_cast<char*>(MapSharedAligned(fd.get(), kSize));
  ASSERT_NE(one, MAP_FAILED);
  ASSERT_NE(two, MAP_FAILED);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(one) % kHugePage, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(two) % kHugePage, 0u);
  one[kSize - 1] = 'x';
  EXPECT_EQ(two[kSize - 1], 'x');
  EXPECT_EQ(munmap(one, kSize), 0);
  EXPECT_EQ(munmap(two, kSize), 0);
}

TEST(HugePagesTest, AMappingThatFailsLeavesNothing) {
  errno = 0;
  EXPECT_EQ(MapSharedAligned(-1, kSize), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
}

// Content stays, holes are filled, and nothing outside whole huge pages is touched.
TEST(HugePagesTest, WholePagesOfARangeBecomeHuge) {
  const UniqueFd fd = MakeFile(kSize);
  auto* const base = static_cast<char*>(MapSharedAligned(fd.get(), kSize));
  ASSERT_NE(base, MAP_FAILED);
  base[kHugePage + 5] = 'x';
  // From the second half of the first page to the first half of the last one.
  UseHugePages(base + kHugePage / 2, 3 * kHugePage);
  EXPECT_EQ(base[kHugePage + 5], 'x');
  const size_t huge = HugeBytes(base);
  EXPECT_LE(FileBytes(fd), 2 * kHugePage);
  munmap(base, kSize);
  if (huge == 0) GTEST_SKIP() << "the kernel gives no huge pages of shared memory";
  EXPECT_EQ(huge, 2 * kHugePage);
  EXPECT_EQ(FileBytes(fd), 2 * kHugePage);
}

TEST(HugePagesTest, ARangeWithoutAWholePageStays) {
  const UniqueFd fd = MakeFile(kSize);
  auto* const base = static_cast<char*>(MapSharedAligned(fd.get(), kSize));
  ASSERT_NE(base, MAP_FAILED);
  UseHugePages(base, kHugePage - 4096);
  UseHugePages(base + kHugePage / 2, kHugePage);
  UseHugePages(base, 0);
  EXPECT_EQ(FileBytes(fd), 0u);
  munmap(base, kSize);
}

// A part that is given back leaves the others as they are.
TEST(HugePagesTest, APartCanBeGivenBack) {
  const UniqueFd fd = MakeFile(kSize);
  auto* const base = static_cast<char*>(MapSharedAligned(fd.get(), kSize));
  ASSERT_NE(base, MAP_FAILED);
  UseHugePages(base, kSize);
  std::memset(base, 'x', kSize);
  constexpr size_t kPart = size_t{256} << 10;
  ASSERT_EQ(madvise(base + kHugePage + kPart, kPart, MADV_REMOVE), 0);
  EXPECT_EQ(FileBytes(fd), kSize - kPart);
  EXPECT_EQ(base[kHugePage + kPart - 1], 'x');
  EXPECT_EQ(base[kHugePage + kPart], 0);
  EXPECT_EQ(base[kHugePage + 2 * kPart], 'x');
  munmap(base, kSize);
}

}  // namespace
}  // namespace ddp::internal
