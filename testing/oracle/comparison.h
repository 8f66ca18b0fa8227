#ifndef DDP_TESTING_ORACLE_COMPARISON_H_
#define DDP_TESTING_ORACLE_COMPARISON_H_

#include <cstdint>
#include <string>

namespace ddp::testing {

// Largest differences between two lists of floats. A value.
struct Difference {
  int64_t ulps = 0;     // distance in representable numbers; kNotComparable if a NaN
  double absolute = 0;  // distance
  double relative = 0;  // distance, divided by the second list's element
  double largest = 0;   // magnitude in the second list

  static constexpr int64_t kNotComparable = INT64_MAX;

  // Sets each field to the larger of the two.
  void Include(const Difference& other);
};

// Returns the distance in representable floats: 0 for equal floats and for +0 and -0, 1 for
// neighbors, Difference::kNotComparable if one is a NaN.
int64_t UlpsBetween(float a, float b);

Difference CompareFloats(const float* ours, const float* theirs, uint64_t count);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_COMPARISON_H_
