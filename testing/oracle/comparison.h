#ifndef DDP_TESTING_ORACLE_COMPARISON_H_
#define DDP_TESTING_ORACLE_COMPARISON_H_

#include <cstdint>
#include <string>

namespace ddp::testing {

// How far two lists of floats lie apart. Pure.
struct Difference {
  int64_t ulps = 0;     // the largest distance in representable numbers; kNotComparable if a NaN
  double absolute = 0;  // the largest distance
  double relative = 0;  // the largest distance, as a part of the second list's element
  double largest = 0;   // magnitude in the second list

  static constexpr int64_t kNotComparable = INT64_MAX;

  // The larger of each.
  void Include(const Difference& other);
};

// How many floats lie between: 0 for equal ones and for +0 and -0, 1 for neighbors.
int64_t UlpsBetween(float a, float b);

Difference CompareFloats(const float* ours, const float* theirs, uint64_t count);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_COMPARISON_H_
