#ifndef DDP_DATA_PARALLEL_CORE_H_
#define DDP_DATA_PARALLEL_CORE_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/buffer_sync.h"
#include "ddp/comm_hook.h"
#include "ddp/delayed_all_reduce.h"
#include "ddp/iteration_timer.h"
#include "ddp/join.h"
#include "ddp/logging_data.h"
#include "ddp/mixed_precision_parameters.h"
#include "ddp/options.h"
#include "ddp/reducer.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {
struct ModelTensors;
}  // namespace ddp::internal

namespace ddp::internal {

// `options` over `group`. Throws ConfigurationError when they name another one.
DistributedDataParallelOptions WithGroup(DistributedDataParallelOptions options,
                                         std::shared_ptr<ProcessGroup> group);

// DistributedDataParallel without the module's type: everything but the forward itself.
//
// Collectives: the constructor, and of a synchronized iteration, in this order: the buffers, or the
// user's hook for them, in BeforeForward; the hook in AfterForward, where it was asked for there;
// the reduction, in the backward. Under a Join every one of them is announced first. Whether a
// forward is synchronized depends on the grad mode and on no_sync(), and never on train() and
// eval(): ranks may differ in these.
//
// A failure on any rank is thrown once on each: by whatever waits for that rank, or else by the
// next BeforeForward. The BeforeForward after that begins afresh, with all ranks together.
//
// Thread-compatible.
class DataParallelCore : public Joinable {
 public:
  // Exactly one of options.process_group and options.device_mesh is set.
  DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                   DistributedDataParallelOptions options);
  ~DataParallelCore() override;
  DataParallelCore(const DataParallelCore&) = delete;
  DataParallelCore& operator=(const DataParallelCore&) = delete;

  void BeforeForward();
  // `outputs`: all tensors that the module returned. `complete`: there can be none besides.
  void AfterForward(const std::vector<at::Tensor>& outputs, bool complete);
  // In a catch block, when the module's forward threw.
  void OnForwardException();

  // What the module is to get for an input, and the caller for an output: moved and cast.
  bool places_inputs() const;
  at::Tensor PlaceInput(const at::Tensor& input) const;
  bool places_outputs() const { return options_.output_device.has_value(); }
  at::Tensor PlaceOutput(const at::Tensor& output) const;

  torch::nn::Module& module() const { return *module_; }

  bool synchronize() const { return synchronize_; }
  void set_synchronize(bool synchronize) { synchronize_ = synchronize; }

  void SyncBuffers();
  void CheckFinished();
  void RegisterCommHook(std::string name, CommHook hook);
  void RegisterBufferCommHook(BufferCommHook hook, BufferCommHookLocation location);
  void RebuildBuckets() { reducer_->RequestRebuild(); }
  void SetBucketLayout(std::vector<std::vector<std::string>> layout);
  void UpdateProcessGroup(std::shared_ptr<ProcessGroup> group);

  DDPLoggingData LoggingData() const;
  void SetLoggingSampleRate(int64_t iterations);
  std::string Describe() const;

  const Reducer& reducer() const { return *reducer_; }
  const std::shared_ptr<ProcessGroup>& group() const { return group_; }

  // Joinable
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  std::shared_ptr<ProcessGroup> join_process_group() override { return group_; }
  void enter_join(Join* join) override;
  void leave_join() override;
  std::string join_name() const override;
  std::string join_event_name(int event) const override;
  bool in_join_event() const override { return join_ != nullptr && in_join_event_; }

 private:
  class Shadow;
  // What a Join is told that the ranks are about to do. Below kForward: a reduction, with these as
  // Reducer::PassFlags.
  enum JoinEvent : int { kForward = 8, kBuffersBefore = 1, kBuffersAfter = 2, kDelayed = 16 };

  void SetUp(const ModelTensors& tensors, std::vector<Reducer::Parameter> trainable,
             const Reducer::Options& reducer_options);
  void CheckOptions() const;
  void CheckPlacement(const ModelTensors& tensors) const;
  Reducer::Options ReducerOptions(const std::vector<Reducer::Parameter>& trainable) const;
  void TakeDelayed(std::vector<Reducer::Parameter>& trainable) const;
  void AgreeOnMetadata(const ModelTensors& tensors, ProcessGroup& group) const;
  void AgreeOnHooks() const;
  void BroadcastState(const ModelTensors& tensors, int source) const;
  bool SyncsBuffers() const;
  void BeginIteration();
  void FollowIncarnation();
  void StartAfresh();
  void FollowParameters();
  void CheckHooksFollow(const std::shared_ptr<ProcessGroup>& group);
  DelayedAllReduce::When DelayedStart() const;
  [[noreturn]] void ThrowNoOutputs(bool complete);
  void SyncForward();
  void ShadowRound(const JoinRound& round);
  void FinishJoin(int last_joiner);
  void OnReductionComplete();
  void WarnOfBareBackward(const std::string& parameter);
  void SetUpMixedPrecision(const ModelTensors& tensors);

  const std::shared_ptr<torch::nn::Module> module_;
  DistributedDataParallelOptions options_;  // only bucket_layout ever changes
  std::shared_ptr<ProcessGroup> group_;
  int64_t incarnation_ = 0;  // of the group that the reducer was set up on
  BufferSync buffers_;
  std::unique_ptr<MixedPrecisionParameters> mixed_precision_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<DelayedAllReduce> delayed_;
  bool synchronize_ = true;
  bool agreed_ = true;  // false: the parameters have changed, and the ranks were not compared since
  bool warned_of_bare_backward_ = false;

  Join* join_ = nullptr;
  JoinOptions join_options_;
  bool was_joined_ = false;
  bool in_join_event_ = false;  // a reduction is announced, and not complete

  IterationTimer timer_;
  int64_t iteration_ = 0;
  std::string first_bucket_sizes_;
};

}  // namespace ddp::internal

#endif  // DDP_DATA_PARALLEL_CORE_H_
