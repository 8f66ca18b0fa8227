#ifndef DDP_COMMON_GRAD_BUCKET_H_
#define DDP_COMMON_GRAD_BUCKET_H_

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/common/tensor_future.h"

namespace ddp {

// The gradients of some parameters in one tensor: the argument of a comm hook. The library makes
// it.
//
// buffer() has one dimension. It holds the gradients one after the other, in the order of
// parameters(). Each has the memory order of its parameter, or row-major order if the parameter
// is not dense in memory. A complex number counts as two real ones. A sparse gradient has a
// bucket of its own, and buffer() is then a sparse tensor.
//
// Copies share all tensors; set_buffer() changes one copy. One thread at a time, even for const
// methods.
class GradBucket {
 public:
  struct Contents {
    int index = 0;         // of the bucket, in the order of reduction
    bool is_last = false;  // the last bucket of this backward
    at::Tensor buffer;
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;  // of the parameters, in their module
  };
  explicit GradBucket(Contents contents);

  int index() const { return contents_.index; }
  bool is_last() const { return contents_.is_last; }
  const at::Tensor& buffer() const { return contents_.buffer; }
  const std::vector<at::Tensor>& parameters() const { return contents_.parameters; }
  const std::vector<std::string>& names() const { return contents_.names; }

  // Returns the parts of buffer(), one for each parameter and in its shape. They share memory with
  // it.
  const std::vector<at::Tensor>& gradients() const;

  // Replaces the buffer. The new one must have as many elements, and may have another type: a hook
  // that wraps another hook passes it such a bucket.
  void set_buffer(at::Tensor buffer);

 private:
  Contents contents_;
  mutable std::vector<at::Tensor> gradients_;  // of gradients_of_; made on demand
  mutable at::Tensor gradients_of_;
};

// A function that reduces one bucket over the ranks, instead of the all-reduce. Called during the
// backward as soon as the bucket's gradients are ready, in the same order on every rank. The hook
// starts its operations and returns a future without waiting. The future's value becomes the
// gradients. It must be like bucket.buffer() in shape, type, layout and device, and may be the
// buffer itself.
//
// The hook averages; the library does not divide where a hook is registered. It is called on the
// thread of the backward; on a rank that has joined, on the thread of the Join.
//
// The bucket and its buffer are valid until the (last) future is complete. A hook may start other
// collectives, in an order that is the same on every rank. Never start a collective in a
// continuation of a future (`then`): continuations run on backend threads, in an order that differs
// between ranks.
//
// An exception of the hook or its future ends the backward on every rank.
using CommHook = std::function<TensorFuture(GradBucket& bucket)>;

// A round after the first of a comm hook. `former` is the value of the future that the round before
// returned for this bucket; that future is complete. Otherwise as CommHook.
using CommHookRound = std::function<TensorFuture(GradBucket& bucket, const c10::IValue& former)>;

// A comm hook that needs the result of one collective to start the next one, as PowerSGD does. Each
// round starts its collectives and returns a future without waiting. The value of the last round's
// future becomes the gradients. The other futures may have any value. All ranks have the same
// number of rounds.
//
// The library calls the first round during the backward, like a CommHook. At the end of the
// backward it calls the second round for every bucket in plan order, then the third, and so on. It
// waits for a bucket's future before it calls the bucket's next round. So all ranks start all
// collectives in the same order, which continuations could not do. A continuation of the last
// future may still decompress. On a device with streams, its kernels run on a stream of their own:
// it may read the bucket and the values of all rounds, which live until then, but for any other
// tensor it needs record_stream().
//
// A hook that averages in half precision, scaled so that no gradient becomes infinite:
//
//   ddp::CommHookRounds hook = {
//       .first = [=](ddp::GradBucket& bucket) -> ddp::TensorFuture {
//         const at::Tensor largest = bucket.buffer().abs().max().view({1}).clamp_min(1e-30);
//         return group->all_reduce_async(largest, ddp::ReduceOp::kMax);
//       },
//       .further = {[=](ddp::GradBucket& bucket, const c10::IValue& former) -> ddp::TensorFuture {
//         const at::Tensor scale = former.toTensorVector().front().mul_(group->size());
//         const at::Tensor half = bucket.buffer().div(scale).to(at::kHalf);
//         return group->all_reduce_async(half).then(
//             [=](c10::ivalue::Future&) -> c10::IValue {
//               return half.to(at::kFloat).mul_(scale / group->size());
//             });
//       }}};
//   model.register_comm_hook(hook, "scaled_half");
struct CommHookRounds {
  CommHook first;
  std::vector<CommHookRound> further = {};
};

namespace internal {

// Returns the tensor that a comm hook produced for `bucket`. Throws ReductionError when it is not
// like the bucket's buffer. The message names the bucket, its parameters, the result and the
// expected form.
at::Tensor CheckedHookResult(const GradBucket& bucket, const c10::IValue& value);

// Returns the tensor in a TensorFuture's value. Throws ReductionError when there is none.
at::Tensor TensorOf(const c10::IValue& value);

}  // namespace internal
}  // namespace ddp

#endif  // DDP_COMMON_GRAD_BUCKET_H_
