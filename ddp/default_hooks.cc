#include "ddp/default_hooks.h"

#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include "ddp/common/error.h"
#include "ddp/common/tensor_future.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

// Returns the values of a sparse tensor; any other tensor itself.
at::Tensor ValuesOf(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._values() : tensor;
}

}  // namespace

TensorFuture allreduce_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  internal::DivideByRanks(bucket.buffer(), group->size());
  return group->all_reduce_async(bucket.buffer());
}

TensorFuture fp16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
  return internal::RunInType(at::kHalf, bucket,
                             [&group](GradBucket& inner) { return allreduce_hook(group, inner); });
}

TensorFuture bf16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
  return internal::RunInType(at::kBFloat16, bucket,
                             [&group](GradBucket& inner) { return allreduce_hook(group, inner); });
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
  GradBucket inner = bucket;
  inner.set_buffer(bucket.buffer().to(type));
  const TensorFuture reduced = hook(inner);
  if (!reduced) throw ReductionError("the comm hook inside a compress wrapper returned no future");
  return reduced->then(
      [inner, buffer = bucket.buffer()](c10::ivalue::Future& done) -> c10::IValue {
        const at::NoGradGuard no_grad;  // runs on another thread
        buffer.copy_(CheckedHookResult(inner, done.value()));
        return buffer;
      },
      c10::TensorType::get());
}

}  // namespace internal
}  // namespace ddp
