// The choice among the instruction sets.
#ifndef DDP_COMM_KERNELS_SUPPORTED_KERNELS_H_
#define DDP_COMM_KERNELS_SUPPORTED_KERNELS_H_

#include <cstddef>
#include <span>

#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/kernel_table.h"

namespace ddp::internal {

// Returns the versions that this processor can execute, the fastest first. The last one is plain
// C++. The tables live forever. Thread-safe.
std::span<const KernelTable* const> SupportedKernels();

// ReduceTree with the kernels of `table`.
void ReduceTreeWith(const KernelTable& table, ReduceKind kind, ElementType type,
                    std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                    size_t count, double factor = 1.0);

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_SUPPORTED_KERNELS_H_
