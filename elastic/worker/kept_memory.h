#ifndef DDP_ELASTIC_WORKER_KEPT_MEMORY_H_
#define DDP_ELASTIC_WORKER_KEPT_MEMORY_H_

#include <string>

#include "base/environment.h"

namespace ddp::elastic::internal {

// By default glibc's malloc returns large freed blocks to the kernel. A training step frees its
// gradients and activations, and the next step allocates the same sizes. The kernel then maps and
// zeroes every page again: one minor fault for each 4 KiB.

// Returns the reason why KeepFreedMemory() leaves malloc as it is; empty: there is none. Reasons:
// DDP_KEEP_FREED_MEMORY is "0", or a variable of glibc (MALLOC_MMAP_THRESHOLD_ and others,
// GLIBC_TUNABLES) already sets a value that KeepFreedMemory() would change.
std::string ReasonToLeaveMalloc(const VariableGetter& variable);

// Makes malloc keep freed memory for later allocations of this process. Returns true when malloc
// took the settings. Returns false where there is a reason against it, or the C library is not
// glibc. Has no effect on another allocator in place of glibc's.
// - Every block comes from the heap, whatever its size; no block is a mapping of its own.
// - malloc never shrinks the heap by itself. The process keeps its peak until malloc_trim(0).
// Thread: any. Call it before large allocations: earlier blocks stay as they are.
bool KeepFreedMemory(const VariableGetter& variable);

}  // namespace ddp::elastic::internal

#endif  // DDP_ELASTIC_WORKER_KEPT_MEMORY_H_
