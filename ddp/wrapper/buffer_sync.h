#ifndef DDP_WRAPPER_BUFFER_SYNC_H_
#define DDP_WRAPPER_BUFFER_SYNC_H_

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm_hook.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class ModelView;

// Keeps a model's buffers equal on all ranks: by a broadcast, or by the user's hook. Owned by a
// ModelSynchronizer.
//
// Each forward reads the buffers from the model again, because a module may replace them. The
// broadcast writes into a buffer's memory, so views of the buffer follow.
//
// An autograd graph may have saved a buffer that the broadcast then changes. Two cases:
// - The last forward changed the buffer, or another buffer of the same submodule, without raising
//   its autograd version. LibTorch's batch norms do so in training. Autograd then treats saved
//   values as unused. The broadcast raises no version either, so several forwards may precede one
//   backward. On a device, where the host does not see the values, a submodule counts as such when
//   the version of another of its buffers has risen, as that of num_batches_tracked does.
// - Otherwise the broadcast raises the version. A backward that needs the old values throws
//   LibTorch's error about an in-place change. It never computes with the new values.
//
// Buffers on the CPU of 64 KiB and more in all are not sent while they do not change. Versions do
// not show every change, so each rank compares its buffers with the values of the last broadcast,
// bit by bit. The ranks then take the maximum of "changed" over all ranks, in place of the
// broadcast: a rank that evaluates alone, or writes a buffer, causes the broadcast on all ranks.
// After a change, the next 1, 2, 4, ... up to 1,024 synchronizations broadcast without a
// comparison, so that buffers that change in every forward cost next to nothing. These counts
// follow from collectives alone, and so are the same on all ranks. A buffer above 1 MiB in a model
// with more than 16 MiB of buffers always counts as changed, because no copy of it is kept.
//
// Thread-compatible.
class BufferSync {
 public:
  // Buffers named in `ignored` are not synchronized.
  BufferSync(std::shared_ptr<const ModelView> model, std::set<std::string> ignored);

  // Sets a hook that replaces the broadcast. Throws ConfigurationError the second time.
  void RegisterHook(BufferCommHook hook, BufferCommHookLocation location);
  BufferCommHook& hook() { return hook_; }  // empty: none

  // Returns the place of the hook in the forward, or "none"; for messages.
  std::string HookText() const;

  // Reads the buffers from the model, by name.
  using Buffers = std::map<std::string, at::Tensor>;
  Buffers Read() const;

  // Returns true when Run() does something with `buffers` at that place of the forward.
  bool Due(BufferCommHookLocation location, const Buffers& buffers) const;

  // When Due(location, buffers): runs the hook, or without a hook makes all ranks' buffers those of
  // `source`. Collective. The second form reads the buffers where it needs them.
  void Run(ProcessGroup& group, BufferCommHookLocation location, int source,
           const Buffers& buffers);
  void Run(ProcessGroup& group, BufferCommHookLocation location, int source);

  // Broadcasts from `source`, with or without a hook. Collective.
  void Broadcast(ProcessGroup& group, int source);

  // Records the buffers' values, as Broadcast() does too. Call it instead of Run() at the start of
  // a forward that builds a graph but is not synchronized.
  void NoteForward();

  // Waits for the operations that hooks have started since the last call.
  void Finish(ProcessGroup& group);

  // Forgets the last broadcast. Call it on all ranks, after a failure or with a new group. Discards
  // the operations that Finish() would wait for, after a failure. If one may still write
  // to the buffers, the buffers get new memory, and earlier views no longer follow.
  void Abandon();

 private:
  // A buffer at the start of the last forward.
  struct Seen {
    at::Tensor tensor;
    int64_t version = 0;
    at::Tensor value;  // undefined: too large to keep, or on a device
  };

  bool IsPlace(BufferCommHookLocation location) const;
  void BroadcastChanged(ProcessGroup& group, int source, const Buffers& buffers);
  void BroadcastAll(ProcessGroup& group, int source, const Buffers& buffers);
  bool Changed(const Buffers& buffers) const;
  void Remember(const std::string& name, const at::Tensor& tensor, const at::Tensor& value);
  std::set<std::string> Updated(const Buffers& buffers) const;

  const std::shared_ptr<const ModelView> model_;
  const std::set<std::string> ignored_;
  BufferCommHook hook_;
  std::optional<BufferCommHookLocation> location_;
  std::vector<TensorFuture> started_;
  std::vector<at::Tensor> in_use_;  // by the operations in started_
  std::map<std::string, Seen> seen_;

  // The same on all ranks.
  int pause_ = 1;           // broadcasts without a comparison after the next change
  int until_compared_ = 1;  // broadcasts before the next comparison
  // Of this rank: the values in seen_ may not be those of the last broadcast.
  bool differs_ = true;
};

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_BUFFER_SYNC_H_
