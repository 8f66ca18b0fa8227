// Converts arrays between float and the two 16-bit floating types, and divides in the same pass.
#ifndef DDP_COMM_KERNELS_COMPRESS_H_
#define DDP_COMM_KERNELS_COMPRESS_H_

#include <cstddef>
#include <cstdint>

#include "ddp/comm/kernels/element_type.h"

namespace ddp::internal {

// For all functions of this header:
// - `type` is kBfloat16 or kHalf.
// - 16-bit numbers are passed as their bits. Rounding is to nearest even.
// - Results have the bits of LibTorch's casts, NaN excepted: a bfloat16 NaN is 0x7FC0, as in
//   c10::BFloat16. LibTorch's vectorized casts give 0xFFFF. A half NaN keeps its sign and the upper
//   bits of its payload, as the processor's instruction has it.
// - `from` and `to` do not overlap, and need no alignment.
// - Thread-safe. Other threads and processes may use other memory at the same time.

// Rounds, divides and rounds the quotient: the bits of `from.to(type).div_(divisor)`. LibTorch
// divides tensors of these types in float. `divisor` is not rounded to the type.
void DivideAs(ElementType type, const float* from, float divisor, size_t count, uint16_t* to);

// Exact.
void WidenFrom(ElementType type, const uint16_t* from, size_t count, float* to);

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_COMPRESS_H_
