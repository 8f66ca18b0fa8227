// Comm hooks: functions of a program that reduce a model's gradients, or synchronize its buffers.
// GradBucket, CommHook and CommHookRounds are in ddp/common/grad_bucket.h, which this header
// includes.
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

#include "ddp/common/grad_bucket.h"  // IWYU pragma: export
#include "ddp/work.h"

namespace ddp {

class ProcessGroup;

// The type of the hooks in default_hooks.h that reduce over a group. register_comm_hook() gives
// such a hook the name of its function by default.
using CommHookFunction = TensorFuture (*)(const std::shared_ptr<ProcessGroup>& group,
                                          GradBucket& bucket);

// When a BufferCommHook runs: before or after the module's forward. In both cases it replaces the
// broadcast of buffers before the forward.
enum class BufferCommHookLocation { kPreForward, kPostForward };

// A function that synchronizes a module's buffers (such as running statistics) at every
// synchronized forward. `buffers` has the buffers by name. The hook writes into the buffers itself:
// the end of the backward waits for the returned futures, but ignores their values. A null future
// is ignored.
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
