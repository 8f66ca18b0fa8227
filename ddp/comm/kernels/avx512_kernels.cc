#include <immintrin.h>

#include <cstdint>

#include "ddp/comm/kernels/kernel_table.h"
#include "ddp/comm/kernels/lanes.h"
#include "ddp/comm/kernels/make_kernel_table.h"

namespace ddp::internal {

struct Avx512Isa {
  static constexpr int kVectorBytes = 64;
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Words __attribute__((vector_size(64)));
  typedef uint16_t Shorts __attribute__((vector_size(32)));
  // The masks name all elements. GCC 12 warns of the functions without a mask.
  static DDP_KERNEL_INLINE Floats FromHalf(Shorts half) {
    return (Floats)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)half);
  }
  static DDP_KERNEL_INLINE Shorts ToHalf(Floats value) {
    return (Shorts)_mm512_maskz_cvtps_ph(0xFFFF, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }
};

constinit const KernelTable kAvx512Kernels = MakeKernelTable<Avx512Isa>("AVX-512");

}  // namespace ddp::internal
