#include "ddp/default_hooks.h"

#include <cstdint>
#include <string>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>

#include "ddp/comm/kernels/compress.h"
#include "ddp/common/error.h"
#include "ddp/common/tensor_future.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

// Returns the values of a sparse tensor; any other tensor itself.
at::Tensor ValuesOf(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._values() : tensor;
}

// Returns whether the kernels can read or write `tensor` as a plain array of `type`.
bool IsArrayOf(c10::ScalarType type, const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         tensor.scalar_type() == type && tensor.is_contiguous();
}

// The least that is worth a thread of its own. LibTorch splits its loops alike.
constexpr int64_t kElementsPerPart = 32768;

bool KernelsKnow(c10::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }
internal::ElementType ElementOf(c10::ScalarType known) {
  return known == at::kHalf ? internal::ElementType::kHalf : internal::ElementType::kBfloat16;
}

// Calls `convert(from, count, to)` with the arrays of two tensors of equal size, in parts that
// several threads convert at once.
template <typename From, typename To, typename Convert>
void ConvertInParts(const at::Tensor& from, const at::Tensor& to, const Convert& convert) {
  const From* const source = static_cast<const From*>(from.const_data_ptr());
  To* const target = static_cast<To*>(to.mutable_data_ptr());
  at::parallel_for(0, from.numel(), kElementsPerPart, [&](int64_t begin, int64_t end) {
    convert(source + begin, end - begin, target + begin);
  });
}

// Returns a copy of `buffer` in `type`, divided by `ranks` after the conversion. Makes one pass
// over a float array. The elements have the bits of LibTorch's conversion and division.
at::Tensor ShareInType(c10::ScalarType type, const at::Tensor& buffer, int ranks) {
  if (!KernelsKnow(type) || !IsArrayOf(at::kFloat, buffer)) {
    const at::Tensor share = buffer.to(type);
    internal::DivideByRanks(share, ranks);
    return share;
  }
  const at::Tensor share = at::empty(buffer.sizes(), buffer.options().dtype(type));
  const float divisor = static_cast<float>(ranks);
  ConvertInParts<float, uint16_t>(buffer, share,
                                  [&](const float* from, int64_t count, uint16_t* to) {
                                    internal::DivideAs(ElementOf(type), from, divisor, count, to);
                                  });
  return share;
}

// Copies `result` into `buffer`, which may have another type.
void CopyInto(const at::Tensor& buffer, const at::Tensor& result) {
  const c10::ScalarType type = result.scalar_type();
  if (!KernelsKnow(type) || !IsArrayOf(type, result) || !IsArrayOf(at::kFloat, buffer)) {
    buffer.copy_(result);
    return;
  }
  ConvertInParts<uint16_t, float>(result, buffer,
                                  [&](const uint16_t* from, int64_t count, float* to) {
                                    internal::WidenFrom(ElementOf(type), from, count, to);
                                  });
  if (!buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
}

// Runs `hook` on a bucket whose buffer is `share`, and copies the result into the bucket's own.
TensorFuture RunOnShare(const at::Tensor& share, GradBucket& bucket, const CommHook& hook) {
  GradBucket inner = bucket;
  inner.set_buffer(share);
  const TensorFuture reduced = hook(inner);
  if (!reduced) throw ReductionError("the comm hook inside a compress wrapper returned no future");
  return reduced->then(
      [inner, buffer = bucket.buffer()](c10::ivalue::Future& done) -> c10::IValue {
        const at::NoGradGuard no_grad;  // runs on another thread
        CopyInto(buffer, internal::CheckedHookResult(inner, done.value()));
        return buffer;
      },
      c10::TensorType::get());
}

}  // namespace

TensorFuture allreduce_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  internal::DivideByRanks(bucket.buffer(), group->size());
  return group->all_reduce_async(bucket.buffer());
}

TensorFuture fp16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
  return internal::AverageInType(at::kHalf, group, bucket);
}

TensorFuture bf16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
  return internal::AverageInType(at::kBFloat16, group, bucket);
}

TensorFuture noop_hook(GradBucket& bucket) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(), internal::FutureDevices(bucket.buffer().device()));
  future->markCompleted(bucket.buffer());
  return future;
}

namespace internal {

// Types with reduced precision are divided instead of multiplied: their few digits show the second
// rounding of a reciprocal, and PyTorch's hooks divide.
void DivideByRanks(const at::Tensor& tensor, int ranks) {
  if (ranks <= 1) return;
  const at::Tensor values = ValuesOf(tensor);
  if (c10::isReducedFloatingType(values.scalar_type())) {
    values.div_(ranks);
  } else {
    values.mul_(1.0 / ranks);
  }
}

std::string NameOfHook(CommHookFunction hook) {
  if (hook == allreduce_hook) return "allreduce_hook";
  if (hook == fp16_compress_hook) return "fp16_compress_hook";
  if (hook == bf16_compress_hook) return "bf16_compress_hook";
  return "custom";
}

TensorFuture RunInType(c10::ScalarType type, GradBucket& bucket, const CommHook& hook) {
  if (bucket.buffer().is_sparse()) return hook(bucket);
  const at::NoGradGuard no_grad;
  return RunOnShare(ShareInType(type, bucket.buffer(), 1), bucket, hook);
}

TensorFuture AverageInType(c10::ScalarType type, const std::shared_ptr<ProcessGroup>& group,
                           GradBucket& bucket) {
  if (bucket.buffer().is_sparse()) return allreduce_hook(group, bucket);
  const at::NoGradGuard no_grad;
  return RunOnShare(
      ShareInType(type, bucket.buffer(), group->size()), bucket,
      [&group](GradBucket& inner) { return group->all_reduce_async(inner.buffer()); });
}

}  // namespace internal
}  // namespace ddp
