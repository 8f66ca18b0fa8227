// The loops of compress.h, as templates over the vectors of lanes.h. See there for the rules of
// this code.
#ifndef DDP_COMM_KERNELS_COMPRESS_LOOPS_H_
#define DDP_COMM_KERNELS_COMPRESS_LOOPS_H_

#include <cstddef>
#include <cstdint>

#include "ddp/comm/kernels/lanes.h"

namespace ddp::internal {

template <class Isa, class Lanes, bool kDivide>
DDP_KERNEL_INLINE void NarrowVector(const void* from, typename Lanes::Vector operands, void* to) {
  const typename Lanes::Vector rounded = Lanes::Round(PlainLanes<Isa, float>::Load(from));
  Lanes::Store(kDivide ? rounded / operands : rounded * operands, to);
}

// As of NarrowFunction.
template <class Isa, class Lanes, bool kDivide>
void Narrow(const float* from, float operand, size_t count, uint16_t* to) {
  const typename Lanes::Vector operands = Fill<Lanes>(operand);
  size_t at = 0;
  for (; at + Lanes::kElements <= count; at += Lanes::kElements) {
    NarrowVector<Isa, Lanes, kDivide>(from + at, operands, to + at);
  }
  if (at == count) return;
  float rest[Lanes::kElements] = {};
  uint16_t result[Lanes::kElements];
  __builtin_memcpy(rest, from + at, (count - at) * sizeof(float));
  NarrowVector<Isa, Lanes, kDivide>(rest, operands, result);
  __builtin_memcpy(to + at, result, (count - at) * sizeof(uint16_t));
}

// As of WidenFunction.
template <class Isa, class Lanes>
void Widen(const uint16_t* from, size_t count, float* to) {
  size_t at = 0;
  for (; at + Lanes::kElements <= count; at += Lanes::kElements) {
    PlainLanes<Isa, float>::Store(Lanes::Load(from + at), to + at);
  }
  if (at == count) return;
  uint16_t rest[Lanes::kElements] = {};
  float result[Lanes::kElements];
  __builtin_memcpy(rest, from + at, (count - at) * sizeof(uint16_t));
  PlainLanes<Isa, float>::Store(Lanes::Load(rest), result);
  __builtin_memcpy(to + at, result, (count - at) * sizeof(float));
}

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_COMPRESS_LOOPS_H_
