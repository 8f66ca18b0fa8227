// Combines arrays that several ranks hold in plain memory, element by element.
#ifndef DDP_COMM_KERNELS_REDUCE_H_
#define DDP_COMM_KERNELS_REDUCE_H_

#include <cstddef>
#include <span>

#include "ddp/comm/kernels/element_type.h"

namespace ddp::internal {

// Writes to every output the combination of `count` elements of all inputs. Input number r is rank
// r's. The inputs of an element are combined in a balanced binary tree:
//   Tree(lo, hi) = Tree(lo, mid) op Tree(mid, hi),
// where mid - lo is the largest power of two that is smaller than hi - lo. So 3 ranks give (0+1)+2,
// 4 give (0+1)+(2+3), and 6 give ((0+1)+(2+3))+(4+5).
//
// - Each input is first multiplied by `factor`, which is converted to the element's type before. A
//   factor other than 1 is for kSum of a floating type only. Factor 1 multiplies nothing.
// - A null input counts as +0 in every element, so that -0 plus a null input is +0. Null inputs are
//   for kSum only.
// - An output is either one of the inputs or overlaps none of them. Two outputs do not overlap.
// - Addresses need no alignment.
// - Integers wrap around.
// - Half and bfloat16: each node of the tree is computed in float and rounded to the type, to
//   nearest even. A product with `factor` is rounded likewise. Gloo computes the same for 2 ranks.
// - kMin and kMax of floating types choose like std::min(left, right) and std::max(left, right),
//   as Gloo does with left = the lower rank: when either is NaN, or when both are zeros, the result
//   is left.
// - A NaN that a node of bfloat16 makes or passes on is 0x7FC0. In other types, a node with one NaN
//   passes its payload on. When two NaNs are added or multiplied, the payload of either may pass.
// - Denormals are kept, also on a thread that has set its processor to flush them.
//
// Every supported processor computes the same bits (up to the payload of two NaNs), wherever an
// element lies in the array.
//
// Dies when `inputs` has no or more than kMaxReduceInputs elements, and when an operation, a factor
// or a null input does not fit. Thread-safe. Other threads and processes may use other memory at
// the same time, even next to the arrays.
void ReduceTree(ReduceKind kind, ElementType type, std::span<const std::byte* const> inputs,
                std::span<std::byte* const> outputs, size_t count, double factor = 1.0);

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_REDUCE_H_
