#include "ddp/comm/kernels/compress.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ddp/comm/kernels/float_environment.h"
#include "ddp/comm/kernels/kernel_table.h"

namespace ddp::internal {
namespace {

// A division by a power of two has the bits of a multiplication, which is several times as fast.
void Divide(const CompressFunctions& functions, const float* from, float divisor, size_t count,
            uint16_t* to) {
  const float reciprocal = 1.0f / divisor;
  int exponent = 0;
  if (divisor == 1.0f) {
    functions.scale(from, 1.0f, count, to);
  } else if (std::frexp(divisor, &exponent) == 0.5f && std::isnormal(reciprocal)) {
    functions.round_multiply(from, reciprocal, count, to);
  } else {
    functions.round_divide(from, divisor, count, to);
  }
}

const KernelTable& Kernels() { return *SupportedKernels().front(); }

}  // namespace

void ScaleToBfloat16(const float* from, float factor, size_t count, uint16_t* to) {
  const DefaultFloatEnvironment environment;
  Kernels().bfloat16.scale(from, factor, count, to);
}

void ScaleToHalf(const float* from, float factor, size_t count, uint16_t* to) {
  const DefaultFloatEnvironment environment;
  Kernels().half.scale(from, factor, count, to);
}

void DivideAsBfloat16(const float* from, float divisor, size_t count, uint16_t* to) {
  const DefaultFloatEnvironment environment;
  Divide(Kernels().bfloat16, from, divisor, count, to);
}

void DivideAsHalf(const float* from, float divisor, size_t count, uint16_t* to) {
  const DefaultFloatEnvironment environment;
  Divide(Kernels().half, from, divisor, count, to);
}

void Bfloat16ToFloat(const uint16_t* from, size_t count, float* to) {
  const DefaultFloatEnvironment environment;
  Kernels().bfloat16.widen(from, count, to);
}

void HalfToFloat(const uint16_t* from, size_t count, float* to) {
  const DefaultFloatEnvironment environment;
  Kernels().half.widen(from, count, to);
}

}  // namespace ddp::internal
