#ifndef DDP_OPTIM_SHARDED_PARAMETERS_H_
#define DDP_OPTIM_SHARDED_PARAMETERS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include "ddp/optim/shard_plan.h"
#include "ddp/work.h"

namespace torch::optim {
class OptimizerParamGroup;
}  // namespace torch::optim

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class PeerMemory;

// Returns the elements of a tensor without gaps as one row, in the order of its memory.
at::Tensor FlatView(const at::Tensor& dense);

// The parameters of a ZeroRedundancyOptimizer: the views that this rank's optimizer updates, and
// the transfers that bring the updated values to the other ranks. Keeps the parameters' tensors.
//
// Ranks of one host that share memory write their values straight into the parameters of the others
// (PeerMemory). Share() moves the parameters into the process's arena for this. A bucket with a
// parameter that is elsewhere on some rank goes by collectives, as every bucket does between hosts.
//
// Thread-compatible.
class ShardedParameters {
 public:
  // A part of one parameter that this rank updates.
  struct Mine {
    int bucket = 0;
    ShardPlan::Piece piece;
    int group = 0;    // of the parameter
    at::Tensor view;  // one row of elements; the whole parameter in its shape in a bucket with an
                      // owner. Shares the parameter's memory. The tensor object never changes.
  };

  ShardedParameters(ShardPlan::Options options, int rank);
  // Blocks while peers may write into the parameters: until they have made the step that this rank
  // has made, or the group has ended.
  ~ShardedParameters();

  // Adds parameter groups. Returns the numbers of the new elements of mine().
  std::vector<size_t> Add(const std::vector<std::vector<at::Tensor>>& groups);

  const ShardPlan& plan() const { return plan_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const std::vector<Mine>& mine() const { return mine_; }

  // Returns true when `groups` have the parameters of Add(), in the same order.
  bool HasGroups(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  // Returns the first parameter whose type, device, shape or strides have changed; -1: none.
  int FindChanged() const;
  // Returns the first parameter whose gradient cannot be used: it is sparse, or has another shape,
  // type or device than the parameter; -1: none.
  int FindUnusableGradient() const;

  // Makes the views follow parameters that have new memory, as after set_data(). Call it only while
  // FindChanged() returns -1.
  void FollowMemory();

  // Returns `rank`'s part of the gradients of a bucket: one row, or a shape in a bucket with an
  // owner, for each piece of the plan; undefined where the parameter has no gradient.
  std::vector<at::Tensor> GradientsOf(int bucket, int rank) const;
  // Sets the views' gradients to this rank's parts, or to `instead`, by mine().
  void TakeGradients();
  void TakeGradients(const std::vector<at::Tensor>& instead);
  void DropGradients();

  // Returns for each bucket whether some parameter of it has a gradient.
  std::vector<bool> BucketsWithGradients() const;

  // ---- Memory that the other ranks see.

  // Moves trainable parameters into the arena, where the group's ranks share memory. The tensors,
  // their views and all aliases stay what they are and follow. Not moved: a parameter that does not
  // fill its storage alone, and memory that LibTorch's CPU allocator has not made.
  void Share(ProcessGroup& group);
  // Returns true when the ranks must call Publish() before the next step: they do not know yet
  // where this rank's parameters lie. Always false where the ranks share no memory.
  bool MustPublish(ProcessGroup& group) const;
  // Calls Share(), and tells all ranks where this rank's parameters lie. Collective. Throws what a
  // collective throws.
  void Publish(ProcessGroup& group);
  // Returns true when peers may have written values of a step that has failed.
  bool written_by_peers() const;
  // To be called after an error in a step, before anything uses a parameter: ends the writes of
  // peers. Also fails the collectives of the group.
  void AbandonPeers();
  // Forgets what Publish() has found.
  void ForgetPeers();

  // Starts to send the values of the buckets in `sent` to all ranks. Collective. Throws what a
  // collective throws; then nothing is pending.
  void StartTransfer(ProcessGroup& group, const std::vector<bool>& sent);
  // Blocks until all transfers are complete, and writes the values into the parameters where peers
  // have not written them. Not a collective. A parameter that has got other memory since
  // StartTransfer() is not written. Returns the first such parameter; -1: none. Throws what a
  // collective throws; some parameters then have old values. Does nothing when none is pending.
  int FinishTransfer();
  bool pending() const { return !transfers_.empty(); }
  void DropTransfers() { transfers_.clear(); }

 private:
  // The memory that a parameter had. Keeps the memory: peers may write into it.
  struct Memory {
    c10::Storage storage;
    const void* data = nullptr;
  };

  struct Transfer {
    int bucket = 0;
    at::Tensor values;           // of all ranks; undefined: peers write into the parameters
    std::vector<Memory> memory;  // by parameter of the bucket
    std::vector<Work> works;
  };

  // The properties of a parameter that must not change.
  struct Form {
    at::ScalarType type;
    at::Device device;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;

    bool Fits(const at::Tensor& tensor) const;
  };

  static Form FormOf(const at::Tensor& tensor);
  ShardPlan::Tensor Property(const at::Tensor& tensor);
  at::Tensor GradientOf(int bucket, const ShardPlan::Piece& piece) const;
  at::Tensor ViewOf(const Mine& mine) const;
  Transfer TransferOf(size_t bucket) const;
  void StartCollectives(ProcessGroup& group, const std::vector<bool>& sent);
  std::vector<Work> Send(ProcessGroup& group, const ShardPlan::Bucket& bucket,
                         const at::Tensor& values) const;
  int Write(const Transfer& transfer);
  bool ReachesPeers(const ShardPlan::Bucket& bucket) const;
  void WriteToPeers(ProcessGroup& group, const std::vector<bool>& sent);
  void LeaveArena();

  const ShardPlan::Options options_;
  const int rank_;
  ShardPlan plan_;
  std::vector<at::Tensor> tensors_;
  std::vector<int> groups_;  // by parameter
  int group_count_ = 0;
  std::vector<Form> forms_;           // by parameter
  std::map<std::string, int> kinds_;  // the numbers of types, devices and trainability
  std::vector<Mine> mine_;
  std::vector<Transfer> transfers_;

  at::Tensor mark_;                    // of PeerMemory, in the arena
  std::vector<int64_t> places_;        // of this rank's parameters, as Publish() has told
  std::unique_ptr<PeerMemory> peers_;  // null: not published
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_SHARDED_PARAMETERS_H_
