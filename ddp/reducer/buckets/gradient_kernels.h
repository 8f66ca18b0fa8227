// The two loops that touch every gradient element. They do not use LibTorch, so that no dispatcher,
// tensor or allocation is between a gradient and its bucket. Compiled for speed in every build.
#ifndef DDP_REDUCER_BUCKETS_GRADIENT_KERNELS_H_
#define DDP_REDUCER_BUCKETS_GRADIENT_KERNELS_H_

#include <cstdint>

namespace ddp::internal {

// Sets to[i] = from[i] * factor for i in [0, count). `to` equals `from`, or does not overlap it.
// Thread: any.
void ScaleCopy(const float* from, float factor, int64_t count, float* to);
void ScaleCopy(const double* from, double factor, int64_t count, double* to);

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_GRADIENT_KERNELS_H_
