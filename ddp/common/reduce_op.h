#ifndef DDP_COMMON_REDUCE_OP_H_
#define DDP_COMMON_REDUCE_OP_H_

#include <cstdint>

namespace ddp {

// How a collective combines the elements of the ranks. These are c10d's reductions under the
// library's own names.
//
// An operation takes every integer and real type that the backend takes for a sum. Gloo takes
// uint8, int8, int32, int64, half, bfloat16, float and double. These rules go beyond that:
//   kAverage            not for integers and bool
//   kBitAnd ... kBitXor integers and bool only; not with NCCL
//   complex numbers     kSum and kAverage only
//   sparse tensors      kSum and kAverage only; all_reduce only
//   bool                kSum and kMax are "or", kProduct and kMin are "and"
enum class ReduceOp : uint8_t {
  kSum,
  kAverage,  // the sum, divided by the number of ranks
  kProduct,
  kMin,
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
};

namespace internal {

constexpr bool IsBitwise(ReduceOp op) {
  return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
}

}  // namespace internal
}  // namespace ddp

#endif  // DDP_COMMON_REDUCE_OP_H_
