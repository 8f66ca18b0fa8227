#include <cstdint>

#include "ddp/comm/kernels/kernel_table.h"
#include "ddp/comm/kernels/lanes.h"
#include "ddp/comm/kernels/make_kernel_table.h"

namespace ddp::internal {

// Half is converted with integers, and with float arithmetic that is exact or rounds where half
// does.
struct GenericIsa {
  static constexpr int kVectorBytes = 16;
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef uint16_t Shorts __attribute__((vector_size(8)));
  static DDP_KERNEL_INLINE Floats FromHalf(Shorts half) {
    const Words bits = __builtin_convertvector(half, Words);
    const Words sign = (bits & 0x8000u) << 16;
    const Words magnitude = (bits & 0x7FFFu) << 13;  // the fraction is where float has it
    const Words exponent = magnitude & (0x1Fu << 23);
    const Words normal = magnitude + ((127u - 15) << 23);
    const Words quiet = magnitude > (0x1Fu << 23) ? Words{} + (1u << 22) : Words{};
    const Words special = (magnitude + ((255u - 31) << 23)) | quiet;
    // A denormal is its fraction times 2^-24: 2^-14 plus that, less 2^-14.
    const Floats smallest_normal = (Floats)(Words{} + ((127u - 14) << 23));
    const Words denormal = (Words)((Floats)(magnitude + ((127u - 14) << 23)) - smallest_normal);
    const Words finite = exponent == 0 ? denormal : normal;
    return (Floats)(sign | (exponent == (0x1Fu << 23) ? special : finite));
  }

  static DDP_KERNEL_INLINE Shorts ToHalf(Floats value) {
    const Words bits = (Words)value;
    const Words sign = (bits >> 16) & 0x8000u;
    const Words magnitude = bits & 0x7FFFFFFFu;
    const Words odd = (magnitude >> 13) & 1u;
    const Words normal = (magnitude - ((127u - 15) << 23) + (0xFFFu + odd)) >> 13;
    // The sum with 0.5 rounds to a multiple of 2^-24, which is half's smallest number.
    const Words half = Words{} + 0x3F000000u;
    const Words denormal = (Words)((Floats)magnitude + (Floats)half) - half;
    const Words infinity = Words{} + 0x7C00u;
    const Words nan = ((magnitude >> 13) & 0x3FFu) | 0x7E00u;
    const Words special = magnitude > 0x7F800000u ? nan : infinity;
    const Words finite = magnitude < ((127u - 14) << 23) ? denormal : normal;
    const Words result = magnitude >= ((127u + 16) << 23) ? special : finite;
    return __builtin_convertvector(sign | result, Shorts);
  }
};

constinit const KernelTable kGenericKernels = MakeKernelTable<GenericIsa>("generic");

}  // namespace ddp::internal
