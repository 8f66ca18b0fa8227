#ifndef DDP_WRAPPER_MODEL_SYNCHRONIZER_H_
#define DDP_WRAPPER_MODEL_SYNCHRONIZER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm_hook.h"
#include "ddp/logging_data.h"
#include "ddp/mixed_precision/mixed_precision_parameters.h"
#include "ddp/model/replica_check.h"
#include "ddp/options.h"
#include "ddp/reducer/delayed_all_reduce.h"
#include "ddp/reducer/iteration_timer.h"
#include "ddp/reducer/reducer.h"
#include "ddp/wrapper/buffer_sync.h"
#include "ddp/wrapper/model_join.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class ModelStatistics;
struct ModelTensors;
class ModelView;
class ModelGroup;
class WrappedParameters;

// Keeps one model equal on all ranks: DistributedDataParallel without the type of the module.
// Shared by all copies of one wrapper.
//
// The constructor is a collective. So are the parts of a synchronized iteration, in this order:
// - the comparison of parameters (ReplicaCheck) in BeforeForward(), where it is due;
// - the running statistics of layers (see below) in BeforeForward(), the first time after a failure
//   outside a Join;
// - the buffers (or the buffer hook) in BeforeForward();
// - the buffer hook in AfterForward(), if registered for that place;
// - the reduction, in the backward.
// Layers with batch statistics over all ranks (SyncBatchNorm) have collectives of their own, in the
// module's forward and in the backward, wherever they are in train(): also under no_sync() and
// without gradients. Under a Join, the model announces the forward's parts together, and each
// layer's sum and the reduction by itself, each before its collectives. The grad mode and no_sync()
// decide whether a forward is synchronized. train() and eval() do not, so ranks may differ in
// these.
//
// A failure on any rank is thrown once on each rank: by the call that waits for the failed rank, or
// by the next BeforeForward(). The BeforeForward() after that starts again with all ranks.
//
// Thread-compatible.
class ModelSynchronizer {
 public:
  // Throws as the constructor of DistributedDataParallel does. Exactly one of options.process_group
  // and options.device_mesh must be set.
  ModelSynchronizer(std::shared_ptr<const ModelView> model, DistributedDataParallelOptions options);
  ~ModelSynchronizer();
  ModelSynchronizer(const ModelSynchronizer&) = delete;
  ModelSynchronizer& operator=(const ModelSynchronizer&) = delete;

  void BeforeForward();
  // `outputs`: all tensors that the module returned. `complete`: no others can be hidden in its
  // result.
  void AfterForward(const std::vector<at::Tensor>& outputs, bool complete);
  // Call it in a catch block, when BeforeForward(), the module's forward or AfterForward() has
  // thrown.
  void OnForwardException();

  const ModelView& model() const { return *model_; }
  const DistributedDataParallelOptions& options() const { return options_; }

  bool synchronize() const { return synchronize_; }
  void set_synchronize(bool synchronize) { synchronize_ = synchronize; }

  void SyncBuffers() { buffers_.Broadcast(*group_, 0); }
  void CheckFinished() { reducer_->CheckFinished(); }
  void RegisterCommHook(std::string name, CommHookRounds hook) {
    reducer_->RegisterHook(std::move(name), std::move(hook));
  }
  void RegisterBufferCommHook(BufferCommHook hook, BufferCommHookLocation location) {
    buffers_.RegisterHook(std::move(hook), location);
  }
  void RebuildBuckets() { reducer_->RequestRebuild(); }
  void SetManualFinalization(bool manual);
  bool FinalizesAfterBackward() const;
  void FinalizeBackward() { reducer_->FinalizeBackward(/*within=*/!FinalizesAfterBackward()); }
  void SetBucketLayout(std::vector<std::vector<std::string>> layout);
  void UpdateProcessGroup(std::shared_ptr<ProcessGroup> group);

  // Adds a function that runs at the beginning of every forward, before the module reads its
  // parameters, as long as `owner` lives. `collective` is true in a synchronized forward: all ranks
  // are in it, and the function may use collectives of the model's group. May throw. Until the
  // owner ends, UpdateProcessGroup() throws ConfigurationError.
  using OnForward = std::function<void(bool collective)>;
  void AddOnForward(const std::shared_ptr<const void>& owner, OnForward on_forward) {
    on_forward_.push_back({.owner = owner, .run = std::move(on_forward)});
  }

  DDPLoggingData LoggingData() const;
  void SetLoggingSampleRate(int64_t iterations);
  std::string Describe() const;

  const Reducer& reducer() const { return *reducer_; }
  const std::shared_ptr<ProcessGroup>& group() const { return group_; }

  ModelJoin& join() const { return *join_; }

 private:
  struct Listener {
    std::weak_ptr<const void> owner;
    OnForward run;
  };

  void TakeGroup(std::shared_ptr<ProcessGroup> group,
                 std::vector<std::shared_ptr<ModelGroup>> own_groups);
  void RunAfterForward(const std::vector<at::Tensor>& outputs, bool complete);
  ModelTensors Tensors() const;
  std::shared_ptr<ModelGroup> ReducedOver() const;
  void SetUp(const ModelTensors& tensors, std::vector<Reducer::Parameter> reduced,
             const Reducer::Options& reducer_options);
  void AgreeOnHooks() const;
  void BroadcastState(const ModelTensors& tensors, int source) const;
  bool SyncsBuffers() const;
  void BeginIteration();
  void TellListeners(bool collective) const;
  void FollowIncarnation();
  void FollowParameters();
  DelayedAllReduce::When DelayedStart() const;
  [[noreturn]] void ThrowNoOutputs(bool complete);
  void CompareReplicas();
  void SyncForward();
  void CheckUnused();
  void OnReductionComplete();
  void WarnOfBareBackward(const std::string& parameter);
  bool LookForStranger(const std::vector<int>& unused);
  void SetUpMixedPrecision(const ModelTensors& tensors);
  void MakeJoin();
  void Equalize(int source);

  const std::shared_ptr<const ModelView> model_;
  std::vector<Listener> on_forward_;
  DistributedDataParallelOptions options_;  // bucket_layout may change, the rest is constant
  std::shared_ptr<ProcessGroup> group_;
  int64_t incarnation_ = 0;  // of the group when the reducer was set up

  std::unique_ptr<ModelStatistics> statistics_;
  BufferSync buffers_;
  std::unique_ptr<MixedPrecisionParameters> mixed_precision_;
  std::unique_ptr<WrappedParameters> wrapped_;
  ReplicaCheck replica_check_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<DelayedAllReduce> delayed_;
  std::unique_ptr<ModelJoin> join_;
  bool synchronize_ = true;
  std::string change_;  // of a parameter since the ranks were compared; empty: none
  bool warned_of_bare_backward_ = false;
  bool warned_of_stranger_ = false;
  std::vector<int> unused_;  // by this rank in the last pass

  IterationTimer timer_;
  int64_t iteration_ = 0;
  std::string first_bucket_sizes_;
};

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_MODEL_SYNCHRONIZER_H_
