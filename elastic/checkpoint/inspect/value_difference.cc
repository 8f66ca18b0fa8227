#include "elastic/checkpoint/inspect/value_difference.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace ddp::elastic {
namespace {

// A small float: a sign bit, `exponent_bits`, and `mantissa_bits`.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // false: the largest exponent has values, and NaN with all bits set
};

double ValueOf(uint32_t bits, const SmallFloat& form) {
  const uint32_t mantissa_mask = (1U << form.mantissa_bits) - 1;
  const uint32_t exponent_mask = (1U << form.exponent_bits) - 1;
  const uint32_t mantissa = bits & mantissa_mask;
  const uint32_t exponent = (bits >> form.mantissa_bits) & exponent_mask;
  const bool negative = ((bits >> (form.mantissa_bits + form.exponent_bits)) & 1) != 0;
  const int bias = (1 << (form.exponent_bits - 1)) - 1;
  double value = 0;
  if (exponent == exponent_mask && form.has_infinity) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == exponent_mask && mantissa == mantissa_mask) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - form.mantissa_bits);
  } else {
    value = std::ldexp(mantissa | (1U << form.mantissa_bits),
                       static_cast<int>(exponent) - bias - form.mantissa_bits);
  }
  return negative ? -value : value;
}

template <typename T>
T Load(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

// Returns value number `part` of the element at `data`.
double ValueAt(Dtype dtype, const char* data, size_t part) {
  switch (dtype) {
    case Dtype::kF8E4M3:
      return ValueOfF8E4M3(Load<uint8_t>(data));
    case Dtype::kF8E5M2:
      return ValueOfF8E5M2(Load<uint8_t>(data));
    case Dtype::kF16:
      return ValueOfF16(Load<uint16_t>(data));
    case Dtype::kBF16:
      return ValueOfBF16(Load<uint16_t>(data));
    case Dtype::kF32:
    case Dtype::kC64:
      return Load<float>(data + part * sizeof(float));
    case Dtype::kF64:
      return Load<double>(data);
    default:
      return 0;
  }
}

}  // namespace

double ValueOfF8E4M3(uint8_t bits) { return ValueOf(bits, {4, 3, /*has_infinity=*/false}); }
double ValueOfF8E5M2(uint8_t bits) { return ValueOf(bits, {5, 2, /*has_infinity=*/true}); }
double ValueOfF16(uint16_t bits) { return ValueOf(bits, {5, 10, /*has_infinity=*/true}); }
double ValueOfBF16(uint16_t bits) { return ValueOf(bits, {8, 7, /*has_infinity=*/true}); }

bool IsFloating(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
    case Dtype::kF16:
    case Dtype::kBF16:
    case Dtype::kF32:
    case Dtype::kF64:
    case Dtype::kC64:
      return true;
    default:
      return false;
  }
}

void ValueDifference::Add(const char* a, const char* b, size_t bytes) {
  const size_t element = DtypeBytes(dtype_);
  const size_t parts = dtype_ == Dtype::kC64 ? 2 : 1;
  for (size_t at = 0; at + element <= bytes; at += element) {
    if (std::memcmp(a + at, b + at, element) == 0) continue;
    ++different_;
    if (!IsFloating(dtype_)) continue;
    for (size_t part = 0; part < parts; ++part) {
      Compare(ValueAt(dtype_, a + at, part), ValueAt(dtype_, b + at, part));
    }
  }
}

void ValueDifference::Compare(double a, double b) {
  if (std::isnan(largest_) || a == b || (std::isnan(a) && std::isnan(b))) return;
  const double difference = std::abs(a - b);
  if (std::isnan(difference) || difference > largest_) largest_ = difference;
}

std::optional<double> ValueDifference::largest() const {
  return IsFloating(dtype_) ? std::optional<double>(largest_) : std::nullopt;
}

}  // namespace ddp::elastic
