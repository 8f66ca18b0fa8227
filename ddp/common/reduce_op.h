#ifndef DDP_COMMON_REDUCE_OP_H_
#define DDP_COMMON_REDUCE_OP_H_

#include <cstdint>

namespace ddp {

// How a collective combines the elements of the ranks: c10d's ReduceOp under the library's own
// names.
//
// Every operation supports the integers and real floating-point types that the backend can add. For
// Gloo: uint8, int8, int32, int64, half, bfloat16, float and double. Exceptions:
//   kAverage            not for integers
//   kBitAnd ... kBitXor integers and bool only; not with NCCL
//   complex numbers     kSum and kAverage only
//   sparse tensors      kSum and kAverage only
//   bool                kSum is "or", kProduct is "and"; no kAverage
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
