#include "ddp/comm/collective.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddp::internal {
namespace {

using Kind = Collective::Kind;

constexpr const char* kAllReduceNames[] = {"all-reduce (sum)",        "all-reduce (average)",
                                           "all-reduce (product)",    "all-reduce (minimum)",
                                           "all-reduce (maximum)",    "all-reduce (bitwise and)",
                                           "all-reduce (bitwise or)", "all-reduce (bitwise xor)"};
constexpr const char* kReduceScatterNames[] = {
    "reduce-scatter (sum)",        "reduce-scatter (average)",    "reduce-scatter (product)",
    "reduce-scatter (minimum)",    "reduce-scatter (maximum)",    "reduce-scatter (bitwise and)",
    "reduce-scatter (bitwise or)", "reduce-scatter (bitwise xor)"};

c10d::ReduceOp::RedOpType BackendOp(ReduceOp op, bool of_bools) {
  using Type = c10d::ReduceOp::RedOpType;
  // A bool is a byte that holds 0 or 1. MAX and MIN keep the result 0 or 1.
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return of_bools ? Type::MAX : Type::SUM;
    case ReduceOp::kProduct:
      return of_bools ? Type::MIN : Type::PRODUCT;
    case ReduceOp::kMin:
      return Type::MIN;
    case ReduceOp::kMax:
      return Type::MAX;
    case ReduceOp::kBitAnd:
      return Type::BAND;
    case ReduceOp::kBitOr:
      return Type::BOR;
    case ReduceOp::kBitXor:
      return Type::BXOR;
  }
  return Type::UNUSED;
}

// Returns a view of `tensor` that a backend can reduce: no backend knows complex numbers or bools.
at::Tensor Numbers(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return tensor;
  if (tensor.is_complex()) return at::view_as_real(tensor);
  return tensor.scalar_type() == at::kBool ? tensor.view(at::kByte) : tensor;
}

at::Tensor Bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

}  // namespace

const char* Collective::Name() const {
  switch (kind) {
    case Kind::kAllReduce:
      return kAllReduceNames[static_cast<int>(op)];
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllGather:
      return "all-gather";
    case Kind::kReduceScatter:
      return kReduceScatterNames[static_cast<int>(op)];
    case Kind::kAllToAll:
      return "all-to-all";
    case Kind::kAllToAllSized:
      return "all-to-all (sizes given)";
  }
  return "";
}

const at::Tensor& Collective::agreed() const {
  const bool in_place = kind == Kind::kAllReduce || kind == Kind::kBroadcast;
  return in_place || kind == Kind::kReduceScatter ? output : input;
}

bool Collective::IsEmpty() const {
  return sizes_agree() && agreed().layout() == at::kStrided && agreed().numel() == 0;
}

void Collective::CopyInGroupOfOne() const {
  if (!input.defined()) return;
  const at::NoGradGuard no_grad;
  output.view({-1}).copy_(input.view({-1}));
}

c10::intrusive_ptr<c10d::Work> Collective::Launch(c10d::Backend& backend,
                                                  const BackendTraits& traits) const {
  switch (kind) {
    case Kind::kAllReduce: {
      c10d::AllreduceOptions options;
      options.reduceOp = BackendOp(op, output.scalar_type() == at::kBool);
      std::vector<at::Tensor> tensors = {Numbers(output)};
      // NCCL has a call of its own for sparse tensors; backends for the CPU take both kinds.
      const bool own_call = output.is_sparse() && traits.RunsOnStream(output.device());
      return own_call ? backend.allreduce_sparse(tensors, options)
                      : backend.allreduce(tensors, options);
    }
    case Kind::kBroadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> tensors = {Bytes(output)};
      return backend.broadcast(tensors, options);
    }
    case Kind::kAllGather: {
      at::Tensor to = Bytes(output);
      at::Tensor from = Bytes(input);
      return backend._allgather_base(to, from);
    }
    case Kind::kReduceScatter: {
      c10d::ReduceScatterOptions options;
      options.reduceOp = BackendOp(op, output.scalar_type() == at::kBool);
      at::Tensor to = Numbers(output.view({-1}));
      at::Tensor from = Numbers(input.view({-1}));
      return backend._reduce_scatter_base(to, from, options);
    }
    case Kind::kAllToAll:
    case Kind::kAllToAllSized: {
      at::Tensor to = Bytes(output);
      at::Tensor from = Bytes(input);
      const auto element_size = static_cast<int64_t>(input.element_size());
      std::vector<int64_t> to_sizes = output_sizes;
      std::vector<int64_t> from_sizes = input_sizes;
      for (int64_t& size : to_sizes) size *= element_size;
      for (int64_t& size : from_sizes) size *= element_size;
      return backend.alltoall_base(to, from, to_sizes, from_sizes);
    }
  }
  return nullptr;
}

}  // namespace ddp::internal
