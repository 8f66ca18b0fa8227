#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_VALUE_DIFFERENCE_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_VALUE_DIFFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "elastic/checkpoint/format/tensor_view.h"

namespace ddp::elastic {

// Returns true for the types whose values have a largest difference: floating and complex types.
bool IsFloating(Dtype dtype);

// Compares the values of two tensors of one type, piece by piece. Thread-compatible.
class ValueDifference {
 public:
  explicit ValueDifference(Dtype dtype) : dtype_(dtype) {}

  // Compares the next `bytes` bytes: whole elements.
  void Add(const char* a, const char* b, size_t bytes);

  // The number of elements with different bits.
  uint64_t different() const { return different_; }

  // The largest absolute difference of two values; of complex values, of their parts. Infinite
  // where an infinite value meets another one. NaN where a NaN meets a number. Two NaNs, and zeros
  // of different signs, differ by 0. nullopt for other types.
  std::optional<double> largest() const;

 private:
  void Compare(double a, double b);

  const Dtype dtype_;
  uint64_t different_ = 0;
  double largest_ = 0;
};

// Returns the value of one 8-bit float: F8E4M3 (finite, as in LibTorch's float8_e4m3fn), F8E5M2.
double ValueOfF8E4M3(uint8_t bits);
double ValueOfF8E5M2(uint8_t bits);
// Returns the value of one 16-bit float.
double ValueOfF16(uint16_t bits);
double ValueOfBF16(uint16_t bits);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_VALUE_DIFFERENCE_H_
