#include "testing/oracle/comparison.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace ddp::testing {
namespace {

// Maps floats to integers of the same order.
int64_t Ordinal(float value) {
  const int32_t bits = std::bit_cast<int32_t>(value);
  return bits >= 0 ? bits : -static_cast<int64_t>(bits & 0x7fffffff);
}

}  // namespace

void Difference::Include(const Difference& other) {
  ulps = std::max(ulps, other.ulps);
  absolute = std::max(absolute, other.absolute);
  relative = std::max(relative, other.relative);
  largest = std::max(largest, other.largest);
}

int64_t UlpsBetween(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return Difference::kNotComparable;
  return std::abs(Ordinal(a) - Ordinal(b));
}

Difference CompareFloats(const float* ours, const float* theirs, uint64_t count) {
  Difference difference;
  for (uint64_t i = 0; i < count; ++i) {
    const double absolute = std::abs(double{ours[i]} - double{theirs[i]});
    const double size = std::abs(double{theirs[i]});
    difference.Include({.ulps = UlpsBetween(ours[i], theirs[i]),
                        .absolute = absolute,
                        .relative = absolute == 0 ? 0 : absolute / size,
                        .largest = size});
  }
  return difference;
}

}  // namespace ddp::testing
