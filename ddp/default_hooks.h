// Comm hooks that come with the library, under PyTorch's names.
//
// Those with a state take the group whose ranks they reduce over:
//
//   model.register_comm_hook(group, ddp::fp16_compress_hook);
//
// They average as the reducer itself does: each rank multiplies by 1/N, then the sum is made. In
// half precision it divides by N.
#ifndef DDP_DEFAULT_HOOKS_H_
#define DDP_DEFAULT_HOOKS_H_

#include <memory>
#include <type_traits>
#include <utility>

#include <c10/core/ScalarType.h>

#include "ddp/comm_hook.h"

namespace ddp {

class ProcessGroup;

// What the reducer does without a hook. A start for hooks of one's own.
TensorFuture allreduce_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket);

// The same in half precision, or bfloat16: half the bytes for float gradients. Each rank divides
// after the conversion, and sums are rounded to the type as well; Gloo adds in it. float16's
// largest number is 65504: larger gradients become infinite. Sparse gradients stay as they are:
// Gloo cannot add sparse tensors of these types.
TensorFuture fp16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket);
TensorFuture bf16_compress_hook(const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket);

// Reduces nothing: every rank keeps its own gradients, and the models drift apart. It shows what a
// step costs without communication.
TensorFuture noop_hook(GradBucket& bucket);

namespace internal {

// "fp16_compress_hook" for that function, and so on; "custom" for any other function and for null.
std::string NameOfHook(CommHookFunction hook);

// Lets `hook` see the bucket with a buffer of type `type`, and converts its result back into the
// bucket's own buffer. A bucket of a sparse gradient goes to `hook` as it is.
TensorFuture RunInType(c10::ScalarType type, GradBucket& bucket, const CommHook& hook);

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

// Any hook, in half precision or bfloat16. A hook with a state keeps it:
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
