#ifndef DDP_BUFFER_SYNC_H_
#define DDP_BUFFER_SYNC_H_

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm_hook.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp {

class ProcessGroup;

// Keeps a module's buffers equal on all ranks: by a broadcast, or by the user's hook instead.
//
// The buffers are read from the module anew every time, since a module may replace them. A buffer
// that changes gets new memory: what a graph has saved of it stays as it was, so a second forward
// before the backward is no error. Thread-compatible.
class BufferSync {
 public:
  // Buffers named in `ignored` are left alone.
  BufferSync(std::shared_ptr<torch::nn::Module> module, std::set<std::string> ignored);

  // Replaces the broadcast. Once; throws ConfigurationError the second time.
  void RegisterHook(BufferCommHook hook, BufferCommHookLocation location);
  BufferCommHook& hook() { return hook_; }  // empty: none

  // Whether there is a hook, and where it is called: for messages.
  std::string HookText() const;

  // Whether something is to be done at that place of the forward.
  bool Due(BufferCommHookLocation location) const;

  // Does it: the hook, or at kPreForward without a hook the broadcast from `source`. A collective.
  void Run(ProcessGroup& group, BufferCommHookLocation location, int source);

  // The broadcast, whether there is a hook or not.
  void Broadcast(ProcessGroup& group, int source);

  // Waits for what hooks have started since the last call.
  void Finish(ProcessGroup& group);

  // Forgets it instead, after a failure. The buffers get memory of their own, since what was given
  // up may still write to the old one.
  void Abandon();

  std::map<std::string, at::Tensor> Buffers() const;

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  const std::set<std::string> ignored_;
  BufferCommHook hook_;
  std::optional<BufferCommHookLocation> location_;
  std::vector<TensorFuture> started_;
  std::vector<at::Tensor> in_use_;  // by them
};

}  // namespace ddp

#endif  // DDP_BUFFER_SYNC_H_
