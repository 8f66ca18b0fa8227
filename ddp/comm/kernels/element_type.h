// The types of the elements that the kernels take, and the operations of the kernels.
#ifndef DDP_COMM_KERNELS_ELEMENT_TYPE_H_
#define DDP_COMM_KERNELS_ELEMENT_TYPE_H_

#include <cstddef>
#include <cstdint>

namespace ddp::internal {

// The type of an element. A caller with complex numbers passes twice as many reals. A caller with
// booleans, which are the bytes 0 and 1, passes kUint8.
enum class ElementType : uint8_t {
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kHalf,
  kBfloat16,
  kFloat,
  kDouble,
};
inline constexpr int kElementTypes = 9;

enum class ReduceKind : uint8_t { kSum, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };
inline constexpr int kReduceKinds = 7;

inline constexpr size_t kMaxReduceInputs = 256;

// Returns the bytes of one element.
constexpr size_t SizeOf(ElementType type) {
  constexpr uint8_t kSizes[kElementTypes] = {1, 1, 2, 4, 8, 2, 2, 4, 8};
  return kSizes[static_cast<int>(type)];
}

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_ELEMENT_TYPE_H_
