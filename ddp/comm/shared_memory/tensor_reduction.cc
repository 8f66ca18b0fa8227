#include "ddp/comm/shared_memory/tensor_reduction.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

namespace ddp::internal {

ElementType ElementTypeOf(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return ElementType::kUint8;
    case at::kChar:
      return ElementType::kInt8;
    case at::kShort:
      return ElementType::kInt16;
    case at::kInt:
      return ElementType::kInt32;
    case at::kLong:
      return ElementType::kInt64;
    case at::kHalf:
      return ElementType::kHalf;
    case at::kBFloat16:
      return ElementType::kBfloat16;
    case at::kFloat:
      return ElementType::kFloat;
    case at::kDouble:
      return ElementType::kDouble;
    default:
      TORCH_CHECK_TYPE(false, "shared memory does not reduce tensors of type ", type,
                       ". Convert with .to(...)");
  }
}

ReduceKind ReduceKindOf(c10d::ReduceOp::RedOpType op, ElementType type) {
  using Op = c10d::ReduceOp;
  const bool bitwise = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  TORCH_CHECK(!bitwise || type < ElementType::kHalf, "bitwise operations are for integers");
  switch (op) {
    case Op::SUM:
      return ReduceKind::kSum;
    case Op::PRODUCT:
      return ReduceKind::kProduct;
    case Op::MIN:
      return ReduceKind::kMin;
    case Op::MAX:
      return ReduceKind::kMax;
    case Op::BAND:
      return ReduceKind::kBitAnd;
    case Op::BOR:
      return ReduceKind::kBitOr;
    case Op::BXOR:
      return ReduceKind::kBitXor;
    default:
      TORCH_CHECK(false, "shared memory has no such reduction");
  }
}

std::span<std::byte> BytesOf(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

at::Tensor BytesOfSparse(const at::Tensor& coalesced) {
  const at::Tensor indices = coalesced.indices().contiguous();
  const at::Tensor values = coalesced.values().contiguous();
  at::Tensor blob =
      at::empty({static_cast<int64_t>(indices.nbytes() + values.nbytes())}, at::kByte);
  const auto bytes = BytesOf(blob);
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), indices.const_data_ptr(), indices.nbytes());
    std::memcpy(bytes.data() + indices.nbytes(), values.const_data_ptr(), values.nbytes());
  }
  return blob;
}

at::Tensor SumOfSparse(const std::vector<at::Tensor>& parts, const at::Tensor& mine, size_t begin,
                       size_t end) {
  if (end - begin > 1) {
    const size_t middle = begin + std::bit_floor(end - begin - 1);
    return SumOfSparse(parts, mine, begin, middle)
        .add(SumOfSparse(parts, mine, middle, end))
        .coalesce();
  }
  const at::Tensor& part = parts[begin];
  const int64_t dims = mine.sparse_dim();
  std::vector<int64_t> shape = mine.values().sizes().vec();
  int64_t entry = static_cast<int64_t>(mine.values().element_size());
  for (size_t i = 1; i < shape.size(); ++i) entry *= shape[i];
  const int64_t index_bytes = dims * static_cast<int64_t>(sizeof(int64_t));
  const int64_t count = part.numel() / (entry + index_bytes);
  shape[0] = count;
  const at::Tensor indices =
      part.narrow(0, 0, count * index_bytes).clone().view(at::kLong).view({dims, count});
  const at::Tensor values = part.narrow(0, count * index_bytes, count * entry)
                                .clone()
                                .view(mine.scalar_type())
                                .view(shape);
  return at::sparse_coo_tensor(indices, values, mine.sizes(), mine.options()).coalesce();
}

}  // namespace ddp::internal
