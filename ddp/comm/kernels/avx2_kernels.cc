#include <immintrin.h>

#include <cstdint>

#include "ddp/comm/kernels/kernel_table.h"
#include "ddp/comm/kernels/lanes.h"
#include "ddp/comm/kernels/make_kernel_table.h"

namespace ddp::internal {

struct Avx2Isa {
  static constexpr int kVectorBytes = 32;
  typedef float Floats __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  typedef uint16_t Shorts __attribute__((vector_size(16)));
  static DDP_KERNEL_INLINE Floats FromHalf(Shorts half) {
    return (Floats)_mm256_cvtph_ps((__m128i)half);
  }
  static DDP_KERNEL_INLINE Shorts ToHalf(Floats value) {
    return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  }
};

constinit const KernelTable kAvx2Kernels = MakeKernelTable<Avx2Isa>("AVX2");

}  // namespace ddp::internal
