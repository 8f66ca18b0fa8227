#ifndef DDP_REDUCER_REDUCER_H_
#define DDP_REDUCER_REDUCER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/comm/communicator.h"
#include "ddp/comm/device_proof.h"
#include "ddp/common/grad_bucket.h"
#include "ddp/process_group/model_group.h"
#include "ddp/reducer/backward_watch.h"
#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/buckets/gradient_buckets.h"
#include "ddp/reducer/buckets/parameter_uses.h"
#include "ddp/reducer/comm_hook_launcher.h"
#include "ddp/reducer/engine_lock.h"
#include "ddp/reducer/gradient_hooks.h"
#include "ddp/reducer/pass/forward_record.h"
#include "ddp/reducer/pass/pass_core.h"
#include "ddp/reducer/plan_agreement.h"
#include "ddp/reducer/streams_used.h"
#include "ddp/reducer/unused_parameters.h"

namespace ddp::internal {

enum class DebugLevel;

// Averages the gradients of one model over the ranks while the backward computes them. Owned by the
// ModelSynchronizer of the model.
//
// A hook on every parameter's gradient accumulator puts the gradient into its bucket. When all
// gradients of a bucket are ready, its reduction starts, while the rest of the backward runs.
// Buckets start in plan order, which is the same on all ranks. A callback at the backward's end
// waits for the sums and makes them the gradients. (The method of PyTorch's DDP: Li et al., VLDB
// 2020.)
//
// One such reduction is a *pass*. PassCore makes the decisions: what becomes of a gradient, when a
// bucket is launched, when the pass is complete, what is an error. The reducer gives it events and
// does the actions that it returns. See pass_core.h for the states and the order of collectives.
//
// Thread-compatible. On the CPU, gradients of one model must come from one thread. On a device,
// autograd has several: see EngineLock. Keeps the parameters' tensors.
class Reducer final : private BackwardWatch::Observer, private GradientHooks::Observer {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;    // a leaf that requires a gradient
    bool sparse = false;  // true: its gradient will be sparse
  };

  struct Options {
    std::vector<int64_t> initial_limits_bytes;  // in the order of filling; see BucketLimits()
    std::vector<int64_t> rebuild_limits_bytes;  // the same, for rebuilt buckets
    bool last_bucket_is_small = false;          // true: a rebuild fills the last bucket first
    std::optional<BucketPlan> plan = {};        // set: used first, and rebuilt on request only
    bool find_unused_parameters = false;
    bool static_graph = false;
    bool skip_unused_buckets = false;
    bool collectives_in_backward = false;        // see PassCore
    GradientBuckets::Factory make_buckets = {};  // unset: FlatBuckets with default options
    // For a model with a comm hook, which needs flat tensors. Unset: make_buckets.
    GradientBuckets::Factory make_hook_buckets = {};
  };

  // Announces a pass to the joined ranks of a Join (see join.h), and returns what the pass needs.
  using PassStart = PassCore::Start;
  using Announce = std::function<PassStart(PassParts)>;

  // Times of the last complete pass, by the monotonic clock.
  struct PassTimes {
    int64_t first_gradient_ns = 0;
    int64_t last_gradient_ns = 0;
    int64_t first_launch_ns = 0;
    int64_t complete_ns = 0;
  };

  // Sets hooks and buckets. All ranks give equal parameters and options. Throws ConfigurationError
  // when no bucket plan can be made.
  Reducer(std::vector<Parameter> parameters, std::shared_ptr<ModelGroup> group, Options options);

  // Removes the hooks. Reports a failure to the peers when a pass is not complete, since they wait
  // for it.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Blocks until a backward that has thrown has ended on autograd's threads, and has reported that.
  void AwaitBackward() const { watch_.AwaitEnd(); }
  // Throws ReductionError, naming the missing parameters, when a pass is not complete. Reports a
  // failure to the peers, which wait for the pass. The reducer is then broken.
  void CheckFinished();

  // Starts again over `group`, on all of its ranks. The state is idle, and the buckets are the
  // first ones, which the next pass rebuilds. Gradients stay. Buffers to which an abandoned
  // communicator may still write are replaced.
  void Reset(std::shared_ptr<ModelGroup> group);

  // Starts again over the same ranks after a failure. The buckets stay, because the exact bits of a
  // sum over more than two ranks depend on them. The next pass begins with an agreement on the
  // buckets. When some rank did not get the rebuilt buckets, all ranks return to the first buckets.
  //
  // A backward on a device returns before the device has the sums, and the program may step on sums
  // that a failure then aborts. When the last pass of some rank was aborted in this way, the next
  // pass throws ReductionError on all ranks, once. The pass after that, and the next pass where the
  // ranks have completed different numbers of passes, begins with set_on_doubt()'s function.
  void ResetAfterFailure(std::shared_ptr<ModelGroup> group);

  // See GradientHooks::ParametersChanged().
  bool ParametersChanged() const { return gradient_hooks_.ParametersChanged(); }

  // Describes a parameter whose change ParametersChanged() has found, before and after.
  std::string DescribeChange() const;

  // Sets hooks and buckets again for the changed parameters, on this rank. Gradients follow the
  // parameter's type and device; a gradient of another shape is dropped. `plan` as in Options. All
  // ranks have to call Reset() before the next pass.
  void FollowParameters(std::optional<BucketPlan> plan);

  // Called around the module's forward. `complete`: `outputs` are all tensors that the module
  // returned. A forward may be unseen: `complete` is false, there are no outputs, or an output is a
  // leaf. A backward through no known forward then belongs to this forward, until this forward is
  // reduced or the next one ends.
  void BeginForward();
  // `collectives`: the backward may have collectives of the model, so peers may wait in them.
  // `training`: the module is in training mode, so a forward without a backward leaves out a step.
  struct ForwardEnd {
    bool complete = true;
    bool synchronize = true;
    bool collectives = false;
    bool training = true;
  };
  void EndForward(const std::vector<at::Tensor>& outputs, const ForwardEnd& end);

  // Sets the hook that reduces the buckets and divides. Throws ConfigurationError when called
  // twice, when a pass has begun, or with an empty function.
  void RegisterHook(std::string name, CommHookRounds rounds);
  CommHook& hook() { return hook_.first_round(); }  // empty: none
  int hook_rounds() const { return hook_.rounds(); }

  // Makes the next pass record the order of gradients and rebuild the buckets. Call it on all
  // ranks.
  void RequestRebuild();

  // Uses these buckets from the next pass on, and rebuilds them on request only. Call it between
  // two passes.
  void UsePlan(BucketPlan plan);

  // From now on, a pass is complete after FinalizeBackward() alone, or by itself at the end of the
  // backward. Throws ReductionError within a pass. All ranks do the same.
  void SetManualFinalization(bool manual);
  bool manual_finalization() const { return core_.manual(); }
  // Returns true when FinalizeBackward() for the next backward has to come after its end.
  bool ends_after_backward() const;
  // Completes the pass: waits for the sums, and makes them the gradients. `within`: also within the
  // backward, once all gradients have come. Throws ReductionError when there is no such pass.
  void FinalizeBackward(bool within);

  // Takes part in a pass of the other ranks with zeros, on a joined rank. `start` is that of the
  // other ranks: this rank may sum a part of their gradients for them.
  void Shadow(PassParts parts, PassStart start);

  // Sets the function that announces each pass; empty: none.
  void set_announce(Announce announce) {
    announce_ = std::move(announce);
    core_.SetAnnounced(announce_ != nullptr);
  }
  // Called when the first pass after the construction or a reset begins, on all ranks. May use
  // collectives and throw.
  void set_on_first_pass(std::function<void()> on_first_pass) {
    on_first_pass_ = std::move(on_first_pass);
  }
  // See ResetAfterFailure(). Called on all ranks; may use collectives. It throws when the
  // parameters of the ranks differ.
  void set_on_doubt(std::function<void()> on_doubt) { on_doubt_ = std::move(on_doubt); }
  // Called at the end of every pass except in Shadow(). The thread is that of the backward, or of
  // EndForward() when the forward reaches no parameter. May throw.
  void set_on_complete(std::function<void()> on_complete) { on_complete_ = std::move(on_complete); }

  // Called with a parameter's name when its gradient comes from a backward through no forward of
  // this reducer. Such a gradient stays on this rank. Once for each such backward.
  void set_on_bare_backward(std::function<void(const std::string&)> on_bare_backward) {
    on_bare_backward_ = std::move(on_bare_backward);
  }

  // Called in a backward that leaves parameters unused, given by their indices, and not the same
  // ones as in the last call that returned true.
  void set_on_unused(std::function<bool(const std::vector<int>&)> on_unused) {
    on_unused_ = std::move(on_unused);
  }

  // `begin` is called when a backward reaches a forward's outputs, synchronized or not; `end` when
  // that backward ends, also by an exception, and before the sums are used. Both may be called
  // again within one backward.
  struct BackwardCallbacks {
    std::function<void()> begin;
    std::function<void()> end;
  };
  void set_backward_callbacks(BackwardCallbacks callbacks) { callbacks_ = std::move(callbacks); }

  // Returns true while the first pass of a static graph is still to come on this rank.
  bool must_count() const { return core_.must_count(); }
  void ForgetCounts() { core_.ForgetCounts(); }

  const BucketPlan& plan() const { return buckets_->plan(); }
  std::string strategy() const { return buckets_->strategy(); }
  std::vector<std::vector<std::string>> plan_names() const { return plan().Names(Names()); }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  bool rebuilt() const { return core_.rebuilt(); }
  const std::string& hook_name() const { return hook_.name(); }
  // Properties of the last pass.
  const std::vector<int>& ready_order() const { return core_.last_order(); }
  const PassTimes& times() const { return times_; }
  const std::optional<std::string>& error() const { return core_.error(); }  // the last error
  int divisor() const { return core_.start().divisor; }                      // of the last pass
  int buckets_reduced() const { return core_.buckets_reduced(); }
  std::vector<int> untouched() const;                                // parameters that no rank used
  const std::vector<int>& unused() const { return core_.unused(); }  // by this rank
  bool finds_unused() const { return core_.finds_unused(); }
  // Returns true when the unused parameters were the same in all passes so far.
  bool can_set_static_graph() const { return core_.can_set_static_graph(); }

 private:
  // BackwardWatch::Observer
  void OnBackwardBegin() override;
  void OnBackwardEnd() override;
  void OnBackwardException() override;
  // GradientHooks::Observer: the hot path, for every gradient.
  void OnGradient(int parameter, const at::Tensor& input) override;

  void Clear(std::shared_ptr<ModelGroup> group, bool unsettled);
  static std::vector<const void*> AddressesOf(const std::vector<at::Tensor>& tensors);
  static std::vector<at::Tensor> TensorsOf(const std::vector<Parameter>& parameters);
  std::vector<std::string> Names() const;
  std::vector<bool> Sparse() const;
  BucketPlan FirstPlan() const;
  void TakeFirstPlan(bool collective = true);
  void InOwnTypes(const std::function<void()>& function);
  void ReturnToFirstPlan();
  void AgreeOnPlan();
  void ResolveDoubt(const PlanComparison& comparison);
  void Prove();
  void SetPlan(BucketPlan plan, PassCore::PlanState state, bool collective = true);
  void SetMapCarrier();

  void SearchGraph();
  BackwardView View() const;
  BackwardView ViewAtEnd() const;

  // Does the actions of the core until there are none.
  void Run();
  void Do(const PassAction& action);
  void DoOrThrow(const PassAction& action);
  void CallAtEnd(void (Reducer::*function)());
  void AnnouncePass();
  void BeginPass();
  void Finish();
  void CompletePass();
  void ReportFailure();
  std::string About(const PassAction& action) const;
  void AgreeOnSkipped();
  void TellUnused(DebugLevel least);

  void JoinStreams(int bucket);
  void LaunchOrSkip(const PassAction& action);
  void Wait(int bucket);
  void WaitAndCopyOut(int bucket);
  void StartUsedMap();
  void WaitUsedMap();
  void TakeUsedMap(int bucket);
  void RebuildBuckets(int source);
  BucketPlan PlanForRebuild() const;

  // In a catch block: reports the failure to the peers, which wait for this rank, and throws the
  // same text.
  [[noreturn]] void Rethrow(const std::string& about);
  void Break(const std::string& reason);

  // parameters_, tensors_ and options_ are constant. The others change in FollowParameters() only.
  const std::vector<Parameter> parameters_;
  const std::vector<at::Tensor> tensors_;  // of parameters_
  const ParameterUses uses_;               // of tensors_
  const Options options_;
  const GradientBuckets::Factory make_buckets_;
  std::vector<BucketPlan::Tensor> descriptions_;

  std::shared_ptr<ModelGroup> group_;
  CommHookLauncher hook_;
  Announce announce_;
  std::function<void()> on_first_pass_;
  std::function<void()> on_doubt_;
  std::function<void()> on_complete_;
  std::function<void(const std::string&)> on_bare_backward_;
  std::function<bool(const std::vector<int>&)> on_unused_;
  std::vector<int> told_unused_;  // those of the last on_unused_ that returned true
  BackwardCallbacks callbacks_;

  std::unique_ptr<GradientBuckets> buckets_;
  std::optional<BucketPlan> given_plan_;
  PassCore core_;

  // The current backward.
  BackwardReach reach_;
  int searched_task_ = -1;            // autograd's number of the last one through no watched output
  std::vector<ForwardPtr> searched_;  // the forwards in its graph

  uint64_t first_node_ = 0;  // of the current forward
  int64_t iteration_ = 0;    // synchronized forwards in training mode, since the last Clear()
  const std::vector<at::Tensor>* outputs_ = nullptr;  // of the last forward

  // The gradient hook that runs now.
  int hooked_parameter_ = -1;
  const at::Tensor* hook_input_ = nullptr;

  // The current pass.
  Communicator::Pending used_map_;
  PassTimes current_times_;

  PassTimes times_;  // of the last complete pass

  // Of the passes that were complete, since the ranks agreed.
  int64_t complete_passes_ = 0;
  DeviceProof proof_;  // of the last one; null: the host has waited for the sums
  PassRecord::Doubt doubt_ = PassRecord::Doubt::kNone;

  StreamsUsed streams_;  // of the gradients of the current pass
  bool on_device_ = false;
  const std::shared_ptr<EngineLock> lock_ = std::make_shared<EngineLock>();

  // Last: their hooks use all members above.
  GradientHooks gradient_hooks_{this};
  BackwardWatch watch_{this, lock_};
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_REDUCER_H_
