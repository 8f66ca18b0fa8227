#ifndef DDP_COMM_ARENA_HUGE_PAGES_H_
#define DDP_COMM_ARENA_HUGE_PAGES_H_

#include <cstddef>

namespace ddp::internal {

// The size of a huge page on x86-64, and on aarch64 with pages of 4 KiB.
inline constexpr size_t kHugePage = size_t{2} << 20;

// Maps the first `bytes` of the file `fd` for reading and writing, shared with other processes. The
// address is a multiple of kHugePage, because otherwise the mapping cannot have huge pages. Returns
// MAP_FAILED and sets errno when mmap fails.
void* MapSharedAligned(int fd, size_t bytes);

// Makes those parts of a shared mapping present in huge pages that fill whole huge pages: gradients
// of 100 MB take 25,000 entries of the page table otherwise, and a backward looks up most of them.
// The range begins at `begin` and has `bytes`. A hole is filled with zeros, and other content
// stays. Blocks while the kernel makes the pages. Only a hint: without the kernel's support
// (MADV_COLLAPSE, Linux 6.1) or its memory nothing changes. Works where the system has huge pages
// of shared memory off (shmem_enabled = never), as it usually has.
void UseHugePages(void* begin, size_t bytes);

}  // namespace ddp::internal

#endif  // DDP_COMM_ARENA_HUGE_PAGES_H_
