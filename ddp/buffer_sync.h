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
}  // namespace ddp

namespace ddp::internal {

// Keeps a module's buffers equal on all ranks: by a broadcast, or by the user's hook instead.
//
// The buffers are read from the module anew every time, since a module may replace them. The
// broadcast writes into a buffer's memory, so views of the buffer follow.
//
// A graph may have saved a buffer that the broadcast changes. Two cases:
// - The last forward changed the buffer, or another one of the same submodule, without raising its
//   autograd version. LibTorch's batch norms do so in training. Autograd then takes saved values to
//   be of no use, and the broadcast raises no version either: several forwards may precede one
//   backward.
// - Otherwise the version rises. A backward that needs the old values throws LibTorch's error about
//   an in-place change, and never computes with the new ones.
//
// Thread-compatible.
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

  // At the start of a forward with gradients that has no broadcast: remembers the buffers' values,
  // as the broadcast does for its forward.
  void NoteForward();

  // Waits for what hooks have started since the last call.
  void Finish(ProcessGroup& group);

  // Forgets it instead, after a failure. If an operation may still write to the buffers, they get
  // memory of their own, and earlier views no longer follow.
  void Abandon();

  std::map<std::string, at::Tensor> Buffers() const;

 private:
  // A buffer at the start of the last forward.
  struct Seen {
    at::Tensor tensor;
    int64_t version = 0;
    at::Tensor value;  // undefined: too large to be kept
  };

  void Remember(const std::string& name, const at::Tensor& tensor, const at::Tensor& value);
  std::set<std::string> Updated(const std::map<std::string, at::Tensor>& buffers) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::set<std::string> ignored_;
  BufferCommHook hook_;
  std::optional<BufferCommHookLocation> location_;
  std::vector<TensorFuture> started_;
  std::vector<at::Tensor> in_use_;  // by them
  std::map<std::string, Seen> seen_;
};

}  // namespace ddp::internal

#endif  // DDP_BUFFER_SYNC_H_
