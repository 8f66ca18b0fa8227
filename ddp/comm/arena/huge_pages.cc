#include "ddp/comm/arena/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace ddp::internal {
namespace {

// MADV_POPULATE_WRITE and MADV_COLLAPSE, which older headers lack.
constexpr int kPopulateWrite = 23;
constexpr int kCollapse = 25;

uintptr_t RoundUp(uintptr_t address) { return (address + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

void* MapSharedAligned(int fd, size_t bytes) {
  constexpr int kFlags = MAP_SHARED | MAP_NORESERVE;
  void* const reserved = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  auto* const begin = static_cast<std::byte*>(reserved);
  auto* const aligned = reinterpret_cast<std::byte*>(RoundUp(reinterpret_cast<uintptr_t>(begin)));
  void* const mapped = mmap(aligned, bytes, PROT_READ | PROT_WRITE, kFlags | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    munmap(reserved, bytes + kHugePage);
    return MAP_FAILED;
  }
  const auto before = static_cast<size_t>(aligned - begin);
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(aligned + bytes, kHugePage - before);
  return mapped;
}

void UseHugePages(void* begin, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t from = RoundUp(first);
  const uintptr_t to = (first + bytes) / kHugePage * kHugePage;
  for (uintptr_t page = from; page < to; page += kHugePage) {
    // The kernel refuses a huge page that is one hole (collapse_file() in mm/khugepaged.c).
    madvise(reinterpret_cast<void*>(page), 1, kPopulateWrite);
    if (madvise(reinterpret_cast<void*>(page), kHugePage, kCollapse) != 0) return;
  }
}

}  // namespace ddp::internal
