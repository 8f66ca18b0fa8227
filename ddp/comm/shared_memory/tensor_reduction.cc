#include "ddp/comm/shared_memory/tensor_reduction.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/view_as_real.h>

namespace ddp::internal {

ElementType ElementTypeOf(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kBool:
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

ReduceKind ReduceKindOf(c10d::ReduceOp::RedOpType op, at::ScalarType type) {
  using Op = c10d::ReduceOp;
  const bool is_bool = type == at::kBool;
  const bool is_number = c10::isFloatingType(type) || c10::isComplexType(type);
  switch (op) {
    case Op::SUM:
    case Op::AVG:
    case Op::PREMUL_SUM:
      TORCH_CHECK(op == Op::SUM || is_number, "averages and scaled sums are for floating types");
      return is_bool ? ReduceKind::kBitOr : ReduceKind::kSum;
    case Op::PRODUCT:
      TORCH_CHECK(!c10::isComplexType(type), "shared memory does not multiply complex numbers");
      return is_bool ? ReduceKind::kBitAnd : ReduceKind::kProduct;
    case Op::MIN:
      TORCH_CHECK(!c10::isComplexType(type), "complex numbers have no minimum");
      return is_bool ? ReduceKind::kBitAnd : ReduceKind::kMin;
    case Op::MAX:
      TORCH_CHECK(!c10::isComplexType(type), "complex numbers have no maximum");
      return is_bool ? ReduceKind::kBitOr : ReduceKind::kMax;
    case Op::BAND:
    case Op::BOR:
    case Op::BXOR:
      TORCH_CHECK(!is_number, "bitwise operations are for integers and bool");
      return op == Op::BAND  ? ReduceKind::kBitAnd
             : op == Op::BOR ? ReduceKind::kBitOr
                             : ReduceKind::kBitXor;
    default:
      TORCH_CHECK(false, "shared memory has no such reduction");
  }
}

double FactorOf(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1;
  const auto* const scale = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(scale != nullptr, "a scaled sum has no factor");
  return scale->tensor_factor.defined() ? scale->tensor_factor.item<double>()
                                        : scale->double_factor;
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

void DivideSums(const at::Tensor& sums, int ranks) {
  const at::Tensor numbers = sums.is_complex() ? at::view_as_real(sums) : sums;
  numbers.div_(ranks);
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
