// The table of each instruction set. SupportedKernels() chooses among them.
#ifndef DDP_COMM_KERNELS_INSTRUCTION_SETS_H_
#define DDP_COMM_KERNELS_INSTRUCTION_SETS_H_

#include "ddp/comm/kernels/kernel_table.h"

namespace ddp::internal {

// Vectors of 16 bytes and nothing that the compiler's default target lacks.
extern const KernelTable kGenericKernels;

#ifdef __x86_64__
// Needs AVX2 and F16C.
extern const KernelTable kAvx2Kernels;
// Needs AVX-512 F, BW, DQ and VL.
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_INSTRUCTION_SETS_H_
