// Fills the table of one instruction set. Each of the files *_kernels.cc calls it once. See lanes.h
// for the rules of this code.
#ifndef DDP_COMM_KERNELS_MAKE_KERNEL_TABLE_H_
#define DDP_COMM_KERNELS_MAKE_KERNEL_TABLE_H_

#include <cstdint>

#include "ddp/comm/kernels/compress_loops.h"
#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/kernel_table.h"
#include "ddp/comm/kernels/lanes.h"
#include "ddp/comm/kernels/reduce_loops.h"

namespace ddp::internal {

template <class Lanes, ReduceKind... kKinds>
constexpr void SetReduce(KernelTable& table, ElementType type) {
  ((table.reduce[static_cast<int>(kKinds)][static_cast<int>(type)] =
        &ReduceLoops<Lanes, kKinds, false>::Reduce),
   ...);
}

// Sums and products of signed integers are those of unsigned ones, which may wrap around.
template <class Isa, class Signed, class Unsigned>
constexpr void SetInteger(KernelTable& table, ElementType type) {
  using Kind = ReduceKind;
  SetReduce<PlainLanes<Isa, Unsigned>, Kind::kSum, Kind::kProduct>(table, type);
  SetReduce<PlainLanes<Isa, Signed>, Kind::kMin, Kind::kMax>(table, type);
}

template <class Lanes>
constexpr void SetFloating(KernelTable& table, ElementType type) {
  using Kind = ReduceKind;
  table.reduce[static_cast<int>(Kind::kSum)][static_cast<int>(type)] = &ReduceSum<Lanes>;
  SetReduce<Lanes, Kind::kProduct, Kind::kMin, Kind::kMax>(table, type);
}

template <class Isa, class Lanes>
constexpr CompressFunctions MakeCompressFunctions() {
  return {.round_multiply = &Narrow<Isa, Lanes, false>,
          .round_divide = &Narrow<Isa, Lanes, true>,
          .widen = &Widen<Isa, Lanes>};
}

template <class Isa>
constexpr KernelTable MakeKernelTable(const char* instruction_set) {
  KernelTable table;
  table.instruction_set = instruction_set;
  SetInteger<Isa, uint8_t, uint8_t>(table, ElementType::kUint8);
  SetInteger<Isa, int8_t, uint8_t>(table, ElementType::kInt8);
  SetInteger<Isa, int16_t, uint16_t>(table, ElementType::kInt16);
  SetInteger<Isa, int32_t, uint32_t>(table, ElementType::kInt32);
  SetInteger<Isa, int64_t, uint64_t>(table, ElementType::kInt64);
  SetFloating<HalfLanes<Isa>>(table, ElementType::kHalf);
  SetFloating<Bfloat16Lanes<Isa>>(table, ElementType::kBfloat16);
  SetFloating<PlainLanes<Isa, float>>(table, ElementType::kFloat);
  SetFloating<PlainLanes<Isa, double>>(table, ElementType::kDouble);
  SetReduce<PlainLanes<Isa, uint8_t>, ReduceKind::kBitAnd, ReduceKind::kBitOr, ReduceKind::kBitXor>(
      table, ElementType::kUint8);
  table.bfloat16 = MakeCompressFunctions<Isa, Bfloat16Lanes<Isa>>();
  table.half = MakeCompressFunctions<Isa, HalfLanes<Isa>>();
  return table;
}

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_MAKE_KERNEL_TABLE_H_
