#include "ddp/comm/kernels/compress.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ddp/comm/kernels/float_environment.h"
#include "ddp/comm/kernels/kernel_table.h"

namespace ddp::internal {
namespace {

const CompressFunctions& FunctionsOf(ElementType type) {
  const KernelTable& kernels = *SupportedKernels().front();
  return type == ElementType::kHalf ? kernels.half : kernels.bfloat16;
}

}  // namespace

// A division by a power of two has the bits of a multiplication, which is several times as fast.
void DivideAs(ElementType type, const float* from, float divisor, size_t count, uint16_t* to) {
  const DefaultFloatEnvironment environment;
  const CompressFunctions& functions = FunctionsOf(type);
  const float reciprocal = 1.0f / divisor;
  int exponent = 0;
  if (std::frexp(divisor, &exponent) == 0.5f && std::isnormal(reciprocal)) {
    functions.round_multiply(from, reciprocal, count, to);
  } else {
    functions.round_divide(from, divisor, count, to);
  }
}

void WidenFrom(ElementType type, const uint16_t* from, size_t count, float* to) {
  const DefaultFloatEnvironment environment;
  FunctionsOf(type).widen(from, count, to);
}

}  // namespace ddp::internal
