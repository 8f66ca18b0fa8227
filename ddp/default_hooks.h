// Comm hooks that are part of the library, under PyTorch's names.
//
// A hook with a state gets the group whose ranks it reduces over:
//
//   model.register_comm_hook(group, ddp::fp16_compress_hook);
//
// Except noop_hook, they average like the reducer without a hook: each rank multiplies by 1/N, then
// the ranks' values are summed. In half precision and bfloat16, each rank divides by N instead.
#ifndef DDP_DEFAULT_HOOKS_H_
#define DDP_DEFAULT_HOOKS_H_

#include <memory>
#include <type_traits>
#include <utility>

#include <c10/core/ScalarType.h>

#include "ddp/comm_hook.h"

namespace ddp {

class ProcessGroup;

// Does the same as the reducer without a hook. Copy it to write a hook of your own.
TensorFuture allreduce_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket);

// Reduces in half precision or bfloat16: half the bytes for float gradients. Each rank divides
// after the conversion. Sums are rounded to the type as well, because the backend adds in it. The
// largest float16 number is 65504: larger gradients become infinite. Sparse gradients are not
// converted, because Gloo cannot add sparse tensors of these types.
TensorFuture fp16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket);
TensorFuture bf16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket);

// Reduces nothing: every rank keeps its own gradients, and the models diverge. Measures what a step
// costs without communication.
TensorFuture noop_hook(GradBucket& bucket);

namespace internal {

// Divides a gradient, dense or sparse, by the number of ranks, as the hooks above do: multiplies by
// 1/N as the reducer does, or divides by N in half precision and bfloat16.
void DivideByRanks(const at::Tensor& tensor, int ranks);

// Returns the name of allreduce_hook, fp16_compress_hook or bf16_compress_hook; "custom" for any
// other function and null.
std::string NameOfHook(CommHookFunction hook);

// Runs `hook` on a bucket whose buffer has type `type`, and converts the result back into the
// bucket's own buffer. A bucket with a sparse gradient is passed to `hook` unchanged.
TensorFuture RunInType(c10::ScalarType type, GradBucket& bucket, const CommHook& hook);

// Does the same as RunInType with allreduce_hook, in fewer passes: one pass converts a float buffer
// on the CPU to half precision or bfloat16 and divides it.
TensorFuture AverageInType(c10::ScalarType type, const std::shared_ptr<ProcessGroup>& group,
                           GradBucket& bucket);

template <c10::ScalarType type, typename Hook>
auto InTypeWrapper(Hook hook) {
  if constexpr (std::is_invocable_v<Hook&, GradBucket&>) {
    return CommHook([hook = CommHook(std::move(hook))](GradBucket& bucket) {
      return RunInType(type, bucket, hook);
    });
  } else {
    return [hook = std::move(hook)](auto& state, GradBucket& bucket) {
      return RunInType(type, bucket, [&](GradBucket& inner) { return hook(state, inner); });
    };
  }
}

}  // namespace internal

// Wraps any hook to reduce in half precision or bfloat16. The result takes the same arguments as
// the hook:
//
//   model.register_comm_hook(state, ddp::fp16_compress_wrapper(my_hook));
template <typename Hook>
auto fp16_compress_wrapper(Hook hook) {
  return internal::InTypeWrapper<c10::ScalarType::Half>(std::move(hook));
}

template <typename Hook>
auto bf16_compress_wrapper(Hook hook) {
  return internal::InTypeWrapper<c10::ScalarType::BFloat16>(std::move(hook));
}

}  // namespace ddp

#endif  // DDP_DEFAULT_HOOKS_H_
