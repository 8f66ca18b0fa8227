#include "ddp/gradient_kernels.h"

namespace ddp {
namespace {

template <typename T>
void ScaleCopyImpl(const T* from, T factor, int64_t count, T* to) {
  if (from == to) {
    for (int64_t i = 0; i < count; ++i) to[i] *= factor;
    return;
  }
  const T* __restrict source = from;
  T* __restrict target = to;
  for (int64_t i = 0; i < count; ++i) target[i] = source[i] * factor;
}

}  // namespace

void ScaleCopy(const float* from, float factor, int64_t count, float* to) {
  ScaleCopyImpl(from, factor, count, to);
}

void ScaleCopy(const double* from, double factor, int64_t count, double* to) {
  ScaleCopyImpl(from, factor, count, to);
}

}  // namespace ddp
