// The kernels of each instruction set, and the choice among them.
#ifndef DDP_COMM_KERNELS_KERNEL_TABLE_H_
#define DDP_COMM_KERNELS_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "ddp/comm/kernels/element_type.h"

namespace ddp::internal {

// Arguments as of ReduceTree, which has checked them.
using ReduceFunction = void (*)(const std::byte* const* inputs, size_t input_count,
                                std::byte* const* outputs, size_t output_count, size_t count,
                                double factor);

// Converts floats to a 16-bit type. `operand` is the factor or the divisor.
using NarrowFunction = void (*)(const float* from, float operand, size_t count, uint16_t* to);

// Converts a 16-bit type to floats.
using WidenFunction = void (*)(const uint16_t* from, size_t count, float* to);

// The conversions between float and one 16-bit type.
struct CompressFunctions {
  NarrowFunction round_multiply = nullptr;  // rounds, multiplies, rounds
  NarrowFunction round_divide = nullptr;    // rounds, divides, rounds
  WidenFunction widen = nullptr;
};

struct KernelTable {
  const char* instruction_set = nullptr;
  // By kind and type. The types of a bitwise kind stand in kUint8 alone. Null where a kind does not
  // exist for a type.
  ReduceFunction reduce[kReduceKinds][kElementTypes] = {};
  CompressFunctions bfloat16;
  CompressFunctions half;
};

// Vectors of 16 bytes and nothing that the compiler's default target lacks.
extern const KernelTable kGenericKernels;

#ifdef __x86_64__
// Needs AVX2 and F16C.
extern const KernelTable kAvx2Kernels;
// Needs AVX-512 F, BW, DQ and VL.
extern const KernelTable kAvx512Kernels;
#endif

// Returns the versions that this processor can execute, the fastest first. The last one is plain
// C++. The tables live forever. Thread-safe.
std::span<const KernelTable* const> SupportedKernels();

// ReduceTree with the kernels of `table`.
void ReduceTreeWith(const KernelTable& table, ReduceKind kind, ElementType type,
                    std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                    size_t count, double factor = 1.0);

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_KERNEL_TABLE_H_
