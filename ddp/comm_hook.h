#ifndef DDP_COMM_HOOK_H_
#define DDP_COMM_HOOK_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/work.h"

namespace ddp {

class ProcessGroup;

// The gradients of some parameters, together in one tensor: what a comm hook is to reduce.
//
// buffer() has one dimension. The parameters' gradients lie in it one after the other, in the order
// of parameters(), each in its parameter's own memory order; a complex number is two real ones. The
// gradient of a parameter with sparse gradients stands alone in its bucket, and buffer() is then
// that sparse tensor itself.
//
// Copies share all tensors. Thread-compatible.
class GradBucket {
 public:
  struct Contents {
    int index = 0;         // of the bucket, in the order in which they are reduced
    bool is_last = false;  // of this backward
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

  // The parts of buffer(), one for each parameter and in its shape. Writing to them writes to it.
  const std::vector<at::Tensor>& gradients() const;

  // `buffer` stands in for the old one, and may be of another type: a hook that wraps another hands
  // it a bucket like this. As many elements as the old one.
  void set_buffer(at::Tensor buffer);

 private:
  Contents contents_;
  mutable std::vector<at::Tensor> gradients_;  // of gradients_of_; made when asked for
  mutable at::Tensor gradients_of_;
};

// Reduces one bucket over the ranks, in place of the all-reduce. Called in the backward, as soon as
// the bucket's gradients are there, in the same order on every rank. It starts what it has to do
// and returns; the future's value becomes the gradients, and must be like bucket.buffer(): shape,
// type, layout and device. The result may be the buffer itself.
//
// The library divides nothing where a hook is registered: the hook averages.
//
// A bucket and its buffer stay valid until the future is complete. A hook may start other
// collectives, in an order that is the same on every rank. A continuation of a future (`then`) may
// start none: continuations run in threads of the backend, and their order differs between ranks.
//
// What a hook or its future throws ends the backward on every rank.
using CommHook = std::function<TensorFuture(GradBucket& bucket)>;

// The form of the hooks in default_hooks.h, whose names the library knows.
using CommHookFunction = TensorFuture (*)(const std::shared_ptr<ProcessGroup>& group,
                                          GradBucket& bucket);

// When a BufferCommHook is called: before the module's forward, in place of the broadcast of
// buffers, or after it.
enum class BufferCommHookLocation { kPreForward, kPostForward };

// Synchronizes a module's buffers (running statistics and the like), given by their names, at every
// synchronized forward. The futures that it returns are waited for at the end of the backward;
// their values are not looked at, so the hook writes into the buffers itself.
using BufferCommHook =
    std::function<std::vector<TensorFuture>(const std::map<std::string, at::Tensor>& buffers)>;

namespace internal {

// A hook whose state is the group that it reduces over. update_process_group() gives it the new
// group; a hook with another state is refused there, since nobody can know what it refers to.
template <typename Result, typename Argument>
struct GroupHook {
  std::shared_ptr<ProcessGroup> group;
  std::function<Result(std::shared_ptr<ProcessGroup>& group, Argument argument)> hook;
  Result operator()(Argument argument) { return hook(group, argument); }
};
using GroupCommHook = GroupHook<TensorFuture, GradBucket&>;

// A CommHook of a hook that keeps something between its calls, called as hook(state, bucket).
// `state` is of any type that can be copied; a std::shared_ptr leaves it visible to the caller.
template <typename State, typename Hook>
CommHook BindCommHook(State state, Hook hook) {
  if constexpr (std::is_same_v<State, std::shared_ptr<ProcessGroup>>) {
    return GroupCommHook{std::move(state), std::move(hook)};
  }
  return [state = std::move(state), hook = std::move(hook)](GradBucket& bucket) mutable {
    return hook(state, bucket);
  };
}

// The tensor that a comm hook gave for `bucket`. Throws ReductionError, which names the bucket, its
// parameters, what came and what was expected, if it is not like the bucket's buffer.
at::Tensor CheckedHookResult(const GradBucket& bucket, const c10::IValue& value);

// The tensor in a TensorFuture's value. Throws ReductionError if there is none.
at::Tensor TensorOf(const c10::IValue& value);

using GroupBufferCommHook =
    GroupHook<std::vector<TensorFuture>, const std::map<std::string, at::Tensor>&>;

// The same for a hook that keeps something, as BindCommHook.
template <typename State, typename Hook>
BufferCommHook BindBufferCommHook(State state, Hook hook) {
  if constexpr (std::is_same_v<State, std::shared_ptr<ProcessGroup>>) {
    return GroupBufferCommHook{std::move(state), std::move(hook)};
  }
  return [state = std::move(state),
          hook = std::move(hook)](const std::map<std::string, at::Tensor>& buffers) mutable {
    return hook(state, buffers);
  };
}

}  // namespace internal
}  // namespace ddp

#endif  // DDP_COMM_HOOK_H_
