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

// The gradients of some parameters in one tensor: the argument of a comm hook. The library makes
// it.
//
// buffer() has one dimension. It holds the parameters' gradients one after the other, in the order
// of parameters(), each in its parameter's own memory order. A complex number counts as two real
// ones. A sparse gradient has a bucket of its own, whose buffer() is the sparse tensor itself.
//
// Copies share all tensors. Thread-compatible.
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
// The hook averages; the library does not divide where a hook is registered.
//
// The bucket and its buffer are valid until the future is complete. A hook may start other
// collectives, in an order that is the same on every rank. Never start a collective in a
// continuation of a future (`then`): continuations run on backend threads, in an order that differs
// between ranks.
//
// An exception of the hook or its future ends the backward on every rank.
using CommHook = std::function<TensorFuture(GradBucket& bucket)>;

// The type of the hooks in default_hooks.h, whose names the library knows.
using CommHookFunction = TensorFuture (*)(const std::shared_ptr<ProcessGroup>& group,
                                          GradBucket& bucket);

// When a BufferCommHook runs: before the module's forward, instead of the broadcast of buffers, or
// after it.
enum class BufferCommHookLocation { kPreForward, kPostForward };

// A function that synchronizes a module's buffers (such as running statistics), given by name, at
// every synchronized forward. It writes into the buffers itself: the end of the backward waits for
// the returned futures, but ignores their values.
using BufferCommHook =
    std::function<std::vector<TensorFuture>(const std::map<std::string, at::Tensor>& buffers)>;

namespace internal {

// A hook whose state is the group that it reduces over. update_process_group() replaces that group.
// update_process_group() refuses a hook with any other state: the library cannot know what that
// state refers to.
template <typename Result, typename Argument>
struct GroupHook {
  std::shared_ptr<ProcessGroup> group;
  std::function<Result(std::shared_ptr<ProcessGroup>& group, Argument argument)> hook;
  Result operator()(Argument argument) { return hook(group, argument); }
};
using GroupCommHook = GroupHook<TensorFuture, GradBucket&>;

// Makes a CommHook of a hook with a state, called as hook(state, bucket). `state` has any copyable
// type; with a std::shared_ptr the caller keeps access to it.
template <typename State, typename Hook>
CommHook BindCommHook(State state, Hook hook) {
  if constexpr (std::is_same_v<State, std::shared_ptr<ProcessGroup>>) {
    return GroupCommHook{std::move(state), std::move(hook)};
  }
  return [state = std::move(state), hook = std::move(hook)](GradBucket& bucket) mutable {
    return hook(state, bucket);
  };
}

// Returns the tensor that a comm hook produced for `bucket`. Throws ReductionError when it is not
// like the bucket's buffer. The message names the bucket, its parameters, the result and the
// expected form.
at::Tensor CheckedHookResult(const GradBucket& bucket, const c10::IValue& value);

// Returns the tensor in a TensorFuture's value. Throws ReductionError when there is none.
at::Tensor TensorOf(const c10::IValue& value);

using GroupBufferCommHook =
    GroupHook<std::vector<TensorFuture>, const std::map<std::string, at::Tensor>&>;

// Does the same as BindCommHook, for a buffer hook.
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
