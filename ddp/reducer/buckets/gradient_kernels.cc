#include "ddp/reducer/buckets/gradient_kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ddp::internal {
namespace {

// The size from which results are written past the caches. In the cache they would evict data that
// the backward is about to read, and each cache line would be fetched before it is written. Smaller
// gradients stay in the cache, where the backend finds them.
constexpr int64_t kStreamBytes = int64_t{1} << 20;

template <typename T>
void ScaleInPlace(T factor, int64_t count, T* data) {
  for (int64_t i = 0; i < count; ++i) data[i] *= factor;
}

template <typename T>
void ScaleApart(const T* __restrict from, T factor, int64_t count, T* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

#if defined(__SSE2__)

constexpr int64_t kLineBytes = 64;

void StreamLine(const float* from, float factor, float* to) {
  const __m128 factors = _mm_set1_ps(factor);
  for (int i = 0; i < 16; i += 4) {
    _mm_stream_ps(to + i, _mm_mul_ps(_mm_loadu_ps(from + i), factors));
  }
}

void StreamLine(const double* from, double factor, double* to) {
  const __m128d factors = _mm_set1_pd(factor);
  for (int i = 0; i < 8; i += 2) {
    _mm_stream_pd(to + i, _mm_mul_pd(_mm_loadu_pd(from + i), factors));
  }
}

template <typename T>
void ScaleStreaming(const T* from, T factor, int64_t count, T* to) {
  constexpr int64_t kLine = kLineBytes / sizeof(T);
  int64_t i = 0;
  for (; reinterpret_cast<uintptr_t>(to + i) % kLineBytes != 0; ++i) to[i] = from[i] * factor;
  for (; i + kLine <= count; i += kLine) StreamLine(from + i, factor, to + i);
  for (; i < count; ++i) to[i] = from[i] * factor;
  _mm_sfence();  // other threads could otherwise see streamed writes after later writes
}

#endif

template <typename T>
void Scale(const T* from, T factor, int64_t count, T* to) {
  if (from == to) return ScaleInPlace(factor, count, to);
#if defined(__SSE2__)
  if (count >= kStreamBytes / static_cast<int64_t>(sizeof(T))) {
    return ScaleStreaming(from, factor, count, to);
  }
#endif
  ScaleApart(from, factor, count, to);
}

}  // namespace

void ScaleCopy(const float* from, float factor, int64_t count, float* to) {
  Scale(from, factor, count, to);
}

void ScaleCopy(const double* from, double factor, int64_t count, double* to) {
  Scale(from, factor, count, to);
}

}  // namespace ddp::internal
