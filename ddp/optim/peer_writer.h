#ifndef DDP_OPTIM_PEER_WRITER_H_
#define DDP_OPTIM_PEER_WRITER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "ddp/optim/peer_memory.h"
#include "ddp/optim/sharded_parameters.h"
#include "ddp/work.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Where all ranks share memory: the parameters in the process's arena, and the writes of this
// rank's values into the parameters of the others (PeerMemory). Elsewhere it reaches no parameter.
// Neither the parameters nor the group may end before it. Thread-compatible.
class PeerWriter {
 public:
  PeerWriter(const ShardedParameters& parameters, ProcessGroup& group)
      : parameters_(parameters), group_(group) {}

  // Moves trainable parameters into the arena. The tensors, their views and all aliases stay what
  // they are and follow. Not moved: a parameter that does not fill its storage alone, and memory
  // that LibTorch's CPU allocator has not made.
  void Share();
  // Returns true when the ranks must call Publish() before the next step: they do not know yet
  // where this rank's parameters lie. Always false where the ranks share no memory.
  bool MustPublish() const;
  // Calls Share(), and tells all ranks where this rank's parameters lie. Collective. Throws what a
  // collective throws.
  void Publish();
  // Forgets what Publish() has found.
  void Forget();

  // Returns true while the ranks know where the parameters of all ranks lie.
  bool published() const { return peers_ != nullptr; }
  // Returns true when Write() can write all parameters of the bucket. The same on all ranks.
  bool Reaches(const ShardPlan::Bucket& bucket) const;
  // Writes this rank's part of the buckets, which Reaches(), into the parameters of all ranks.
  // Returns the barrier that tells that all ranks have done so. Throws what a collective throws.
  Work Write(const std::vector<int>& buckets);
  // The barriers of all writes are complete.
  void Complete();
  // Returns true when peers may have written values of a step that has failed.
  bool written() const;

  // To be called after an error in a step, before anything uses a parameter: ends the writes of
  // peers. Also fails the collectives of the group. `in_use`: memory that parameters had when the
  // step began; a stopped peer may still write into it.
  void Abandon(const std::vector<c10::Storage>& in_use);

 private:
  void LeaveArena(const std::vector<c10::Storage>& in_use);

  const ShardedParameters& parameters_;
  ProcessGroup& group_;
  at::Tensor mark_;                    // of PeerMemory, in the arena
  std::vector<int64_t> places_;        // of this rank's parameters, as Publish() has told
  std::unique_ptr<PeerMemory> peers_;  // null: not published
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_PEER_WRITER_H_
