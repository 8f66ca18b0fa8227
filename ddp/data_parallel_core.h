#ifndef DDP_DATA_PARALLEL_CORE_H_
#define DDP_DATA_PARALLEL_CORE_H_

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp {

class ProcessGroup;
class Reducer;

// The names, defaults and effects are those of PyTorch's DistributedDataParallel.
struct DistributedDataParallelOptions {
  // Size in MiB up to which gradients are gathered before they are reduced together. Larger:
  // fewer, longer messages; smaller: more overlap with the backward.
  double bucket_cap_mb = 25;

  // The same for the bucket that is ready first, so that communication starts early.
  double first_bucket_cap_mb = 1;

  // Every synchronized forward of a model in training begins with rank 0's buffers (running
  // statistics of batch norms) on all ranks.
  bool broadcast_buffers = true;

  // Lets gradients be parts of the buckets instead of copies: saves one gradient's memory and a
  // copy per step. Then gradients must not be detached in place or replaced by other tensors;
  // zero_grad() is fine in both its forms.
  bool gradient_as_bucket_view = false;

  // The buckets of an earlier run, as bucket_layout() gave them and a checkpoint kept them. Sums
  // over more than two ranks depend on the buckets to the bit, so a run that is to continue another
  // bit by bit needs its layout. Empty: dealt by size, and once more after the first backward.
  std::vector<std::vector<std::string>> bucket_layout;
};

// DistributedDataParallel without the module's type: everything but the forward itself.
//
// Collectives: the constructor, and BeforeForward of every synchronized forward.
// Thread-compatible.
class DataParallelCore {
 public:
  DataParallelCore(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ProcessGroup> group,
                   const DistributedDataParallelOptions& options);
  ~DataParallelCore();
  DataParallelCore(const DataParallelCore&) = delete;
  DataParallelCore& operator=(const DataParallelCore&) = delete;

  void BeforeForward();
  void AfterForward();

  bool synchronize() const { return synchronize_; }
  void set_synchronize(bool synchronize) { synchronize_ = synchronize; }

  void SyncBuffers();

  const Reducer& reducer() const { return *reducer_; }

 private:
  void CheckPlacement() const;
  void AgreeOnMetadata() const;
  void BroadcastState() const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<ProcessGroup> group_;
  const DistributedDataParallelOptions options_;
  std::unique_ptr<Reducer> reducer_;
  bool synchronize_ = true;
};

}  // namespace ddp

#endif  // DDP_DATA_PARALLEL_CORE_H_
