#ifndef DDP_OPTIM_VALUE_TRANSFER_H_
#define DDP_OPTIM_VALUE_TRANSFER_H_

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "ddp/optim/peer_writer.h"
#include "ddp/optim/sharded_parameters.h"
#include "ddp/work.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Brings the values that this rank's optimizer has updated to the other ranks. A bucket goes by
// writes into the memory of peers where PeerWriter reaches it. A bucket with a parameter that is
// elsewhere on some rank goes by collectives, as every bucket does between hosts.
//
// Neither the parameters nor the group may end before it. Thread-compatible.
class ValueTransfer {
 public:
  ValueTransfer(const ShardedParameters& parameters, ProcessGroup& group)
      : parameters_(parameters), group_(group), peers_(parameters, group) {}
  // Blocks while peers may write into the parameters: until they have made the step that this rank
  // has made, or the group has ended.
  ~ValueTransfer();
  ValueTransfer(const ValueTransfer&) = delete;
  ValueTransfer& operator=(const ValueTransfer&) = delete;

  // Starts to send the values of the buckets in `sent` to all ranks. Collective. Throws what a
  // collective throws; then nothing is pending.
  void Start(const std::vector<bool>& sent);
  // Blocks until all transfers are complete, and writes the values into the parameters where peers
  // have not written them. Not a collective. A parameter that has got other memory since Start() is
  // not written. Returns the first such parameter; -1: none. Throws what a collective throws; some
  // parameters then have old values. Does nothing when none is pending.
  int Finish();
  bool pending() const { return !buckets_.empty(); }
  void Drop() { buckets_.clear(); }

  // To be called after an error in a step, before anything uses a parameter: ends the writes of
  // peers. Also fails the collectives of the group.
  void AbandonPeers();
  PeerWriter& peers() { return peers_; }
  const PeerWriter& peers() const { return peers_; }

 private:
  // The memory that a parameter had. Keeps the memory: peers may write into it.
  struct Memory {
    c10::Storage storage;
    const void* data = nullptr;
  };

  // A bucket on its way.
  struct Sent {
    int bucket = 0;
    at::Tensor values;           // of all ranks; undefined: peers write into the parameters
    std::vector<Memory> memory;  // by parameter of the bucket
    std::vector<Work> works;
  };

  Sent SentBucket(int bucket) const;
  void StartCollectives(const ShardPlan::Bucket& bucket, Sent& sent);
  int Write(const Sent& sent);

  const ShardedParameters& parameters_;
  ProcessGroup& group_;
  PeerWriter peers_;
  std::vector<Sent> buckets_;
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_VALUE_TRANSFER_H_
