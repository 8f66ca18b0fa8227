// The loops of compress.h, as templates over the vectors of lanes.h. See there for the rules of
// this code.
#ifndef DDP_COMM_KERNELS_COMPRESS_LOOPS_H_
#define DDP_COMM_KERNELS_COMPRESS_LOOPS_H_

#include <cstddef>
#include <cstdint>

#include "ddp/comm/kernels/lanes.h"

namespace ddp::internal {

// Loads elements by From, and stores by To what `convert` makes of each vector.
template <class From, class To, class Function>
DDP_KERNEL_INLINE void Convert(const typename From::Element* from, size_t count,
                               typename To::Element* to, const Function& convert) {
  size_t at = 0;
  for (; at + To::kElements <= count; at += To::kElements) {
    To::Store(convert(From::Load(from + at)), to + at);
  }
  if (at == count) return;
  typename From::Element rest[To::kElements] = {};
  typename To::Element result[To::kElements];
  __builtin_memcpy(rest, from + at, (count - at) * sizeof(rest[0]));
  To::Store(convert(From::Load(rest)), result);
  __builtin_memcpy(to + at, result, (count - at) * sizeof(result[0]));
}

// As of NarrowFunction.
template <class Isa, class Lanes, bool kDivide>
void Narrow(const float* from, float operand, size_t count, uint16_t* to) {
  using Vector = typename Lanes::Vector;
  const Vector operands = Fill<Lanes>(operand);
  Convert<PlainLanes<Isa, float>, Lanes>(
      from, count, to, [&](Vector value) __attribute__((always_inline)) {
        const Vector rounded = Lanes::Round(value);
        return kDivide ? rounded / operands : rounded * operands;
      });
}

// As of WidenFunction.
template <class Isa, class Lanes>
void Widen(const uint16_t* from, size_t count, float* to) {
  Convert<Lanes, PlainLanes<Isa, float>>(
      from, count, to,
      [](typename Lanes::Vector value) __attribute__((always_inline)) { return value; });
}

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_COMPRESS_LOOPS_H_
