#ifndef DDP_COMM_KERNELS_FLOAT_ENVIRONMENT_H_
#define DDP_COMM_KERNELS_FLOAT_ENVIRONMENT_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ddp::internal {

// Gives the calling thread the floating-point rules of IEEE 754 for the life of the object:
// denormals are kept, and results are rounded to nearest. A sum runs on the caller's thread or on a
// helper's, of any rank. at::set_flush_denormal() holds for one thread, so without this object the
// bits of a sum would depend on the thread. Costs the read of one register where nothing changes.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() : before_(Read()) {
    if ((before_ & kRules) != 0) Write(before_ & ~kRules);
  }
  ~DefaultFloatEnvironment() {
    if ((before_ & kRules) != 0) Write(before_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  // MXCSR: flush to zero (15), rounding (13, 14), denormals are zeros (6).
  static constexpr uint64_t kRules = 1U << 15 | 3U << 13 | 1U << 6;
  static uint64_t Read() { return _mm_getcsr(); }
  static void Write(uint64_t rules) { _mm_setcsr(static_cast<uint32_t>(rules)); }
#elif defined(__aarch64__)
  // FPCR: flush to zero (24), rounding (22, 23), flush to zero of half floats (19).
  static constexpr uint64_t kRules = 1U << 24 | 3U << 22 | 1U << 19;
  static uint64_t Read() {
    uint64_t rules = 0;
    asm volatile("mrs %0, fpcr" : "=r"(rules));
    return rules;
  }
  static void Write(uint64_t rules) { asm volatile("msr fpcr, %0" : : "r"(rules)); }
#else
  static constexpr uint64_t kRules = 0;
  static uint64_t Read() { return 0; }
  static void Write(uint64_t /*rules*/) {}
#endif

  const uint64_t before_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_FLOAT_ENVIRONMENT_H_
