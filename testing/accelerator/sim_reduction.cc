#include "testing/accelerator/sim_reduction.h"

#include <utility>

#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include "testing/accelerator/accelerator.h"

namespace ddp::testing {

using Type = c10d::ReduceOp::RedOpType;

namespace {

// Multiplies numbers of 16 bits in float, and rounds once.
at::Tensor Scaled(const at::Tensor& tensor, const at::Tensor& factor) {
  const auto type = at::promote_types(tensor.scalar_type(), at::kFloat);
  return tensor.to(type).mul_(factor).to(tensor.scalar_type());
}

}  // namespace

at::Tensor FlatKernelView(const at::Tensor& tensor) {
  const at::TensorOptions options(tensor.scalar_type());
  return at::from_blob(Accelerator().KernelView(tensor.data_ptr()), {tensor.numel()}, options);
}

SimReduction::SimReduction(const c10d::ReduceOp& op, const at::Tensor& tensor) : type_(op) {
  const bool bitwise = type_ == Type::BAND || type_ == Type::BOR || type_ == Type::BXOR;
  TORCH_CHECK(!bitwise, "Cannot use ReduceOp.", bitwise ? "BAND, BOR or BXOR" : "", " with NCCL");
  if (tensor.scalar_type() == at::kBool) {
    TORCH_CHECK(type_ != Type::AVG, "Cannot use ReduceOp.AVG with boolean inputs");
    if (type_ == Type::SUM) type_ = Type::MAX;
    if (type_ == Type::PRODUCT) type_ = Type::MIN;
  }
  if (type_ != Type::PREMUL_SUM) return;
  const auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "PREMUL_SUM needs a factor");
  factor_ = supplement->tensor_factor.defined() ? FlatKernelView(supplement->tensor_factor)
                                                : at::scalar_tensor(supplement->double_factor);
}

at::Tensor SimReduction::Combine(std::vector<at::Tensor> ranks) const {
  const bool integral = at::isIntegralType(ranks[0].scalar_type(), /*includeBool=*/true);
  const auto size = static_cast<double>(ranks.size());
  for (at::Tensor& rank : ranks) {
    if (type_ == Type::AVG && !integral) rank = Scaled(rank, at::scalar_tensor(1 / size));
    if (type_ == Type::PREMUL_SUM) rank = Scaled(rank, factor_);
  }
  while (ranks.size() > 1) {
    std::vector<at::Tensor> pairs;
    for (size_t i = 0; i < ranks.size(); i += 2) {
      pairs.push_back(i + 1 < ranks.size() ? CombineTwo(ranks[i], ranks[i + 1]) : ranks[i]);
    }
    ranks = std::move(pairs);
  }
  if (type_ == Type::AVG && integral) ranks[0].div_(size, "trunc");
  return ranks[0];
}

at::Tensor SimReduction::CombineTwo(const at::Tensor& a, const at::Tensor& b) const {
  switch (type_) {
    case Type::PRODUCT:
      return a * b;
    case Type::MIN:
      return at::minimum(a, b);
    case Type::MAX:
      return at::maximum(a, b);
    default:
      return a + b;
  }
}

}  // namespace ddp::testing
