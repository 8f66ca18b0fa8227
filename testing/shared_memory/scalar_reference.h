// The two 16-bit floating types, one number at a time, computed another way than the kernels do.
#ifndef DDP_TESTING_SHARED_MEMORY_SCALAR_REFERENCE_H_
#define DDP_TESTING_SHARED_MEMORY_SCALAR_REFERENCE_H_

#include <bit>
#include <cmath>
#include <cstdint>

namespace ddp::internal {

inline float FloatOfBfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Of the two neighbours, chooses the nearer, and the even one of two that are equally near.
inline uint16_t Bfloat16Of(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t down = bits >> 16;
  const uint32_t rest = bits & 0xFFFF;
  const bool up = rest > 0x8000 || (rest == 0x8000 && down % 2 == 1);
  return down + up;
}

inline float FloatOfHalf(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31;
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) {
    const uint32_t quiet = fraction != 0 ? 1u << 22 : 0;
    return std::bit_cast<float>(sign | 0x7F800000u | quiet | uint32_t(fraction) << 13);
  }
  const float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                        : std::ldexp(float(1024 + fraction), exponent - 25);
  return sign != 0 ? -magnitude : magnitude;
}

inline uint16_t HalfOf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = bits >> 31 << 15;
  if (std::isnan(value)) return sign | 0x7E00 | (bits >> 13 & 1023);
  const double magnitude = std::fabs(double{value});
  if (magnitude >= 65520) return sign | 0x7C00;  // halfway to 2^16, which is even
  // The distance of two halves is that of the numbers with the same exponent, at least 2^-24.
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude is below 2^exponent
  const int unit = exponent - 11 < -24 || magnitude == 0 ? -24 : exponent - 11;
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // A number of 1024 units and more has the exponent unit + 25. A carry goes into the exponent.
  return sign | (((unit + 24) << 10) + units);
}

}  // namespace ddp::internal

#endif  // DDP_TESTING_SHARED_MEMORY_SCALAR_REFERENCE_H_
