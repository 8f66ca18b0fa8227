// The two loops that touch every gradient element. Without LibTorch, so that no dispatcher, tensor
// or allocation stands between a gradient and its bucket, and compiled for speed in every build.
#ifndef DDP_GRADIENT_KERNELS_H_
#define DDP_GRADIENT_KERNELS_H_

#include <cstdint>

namespace ddp::internal {

// to[i] = from[i] * factor for i in [0, count). `to` may be `from`; otherwise they do not overlap.
// Any thread.
void ScaleCopy(const float* from, float factor, int64_t count, float* to);
void ScaleCopy(const double* from, double factor, int64_t count, double* to);

}  // namespace ddp::internal

#endif  // DDP_GRADIENT_KERNELS_H_
