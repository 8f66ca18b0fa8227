#ifndef DDP_REDUCER_H_
#define DDP_REDUCER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/backward_watch.h"
#include "ddp/bucket_plan.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm_hook.h"
#include "ddp/flat_buckets.h"
#include "ddp/unused_parameters.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

enum class DebugLevel;

// Averages the gradients of one model over the ranks while they are computed.
//
// A hook on every parameter's gradient accumulator puts the gradient into its bucket. When all of a
// bucket are there, its all-reduce starts, always in plan order so that the ranks agree; the rest
// of the backward runs meanwhile. At the backward's end a callback waits for the sums and makes
// them the gradients. (The method is that of PyTorch's DDP: Li et al., VLDB 2020.)
//
// One such reduction is a *pass*. It begins with the first gradient of a backward that comes from a
// synchronized forward, and is complete when every parameter has contributed; the backward that
// began it may end earlier, and another one may go on with it.
//
//   state      what a gradient means                        leaves it
//   idle       begins a pass, or accumulates on this rank   first of a pass -> reducing, or
//              only, or is an error: see below              -> counting (static graph, first time)
//   counting   is counted                                   backward's end -> reducing -> idle
//   reducing   goes into its bucket                         backward's end -> idle when it was the
//                                                           last one of the pass, else -> open
//   open       goes on with the pass, or accumulates on     as idle; -> reducing
//              this rank only
//   broken     is an error                                  Reset() -> idle
//
// A gradient belongs to the forwards that its backward passes. Where one of them is synchronized
// and not reduced, it is reduced; where all synchronized ones are reduced already, it is an error;
// else it accumulates on this rank only: under no_sync, and from the bare module, always.
//
// Collectives of a pass, in this order on every rank: [which parameters are used, where unused
// buckets are skipped]; the buckets in plan order; [which parameters are used, where that is asked
// for]; [the new plan, in the pass that ends with new buckets].
//
// Thread-compatible; gradients of one model come from one thread (autograd's thread for the
// device). Keeps the parameters' tensors.
class Reducer final : private BackwardWatch::Observer {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;    // a leaf that requires a gradient
    bool sparse = false;  // its gradient will be
  };

  struct Options {
    std::vector<int64_t> initial_limits_bytes;  // first bucket, further buckets
    std::vector<int64_t> rebuild_limits_bytes;  // the same, once the order is known
    bool last_bucket_is_small = false;          // the first limit is for the last bucket
    std::optional<BucketPlan> plan = {};        // given: used as it is, from the first backward on
    bool find_unused_parameters = false;
    bool static_graph = false;
    bool skip_unused_buckets = false;
    FlatBuckets::Options buckets;
  };

  // What a pass consists of beyond its buckets: bits of one small number, for ranks that have
  // joined and can know it from the others only.
  enum PassFlags : int {
    kRebuildAfter = 1,   // new buckets at the end
    kUsedMapAfter = 2,   // which parameters were used, after the buckets
    kUsedMapBefore = 4,  // the same before them
  };

  // Under a Join: tells the ranks that have joined that a pass begins.
  struct PassStart {
    int divisor = 1;  // what sums are divided by
    int source = 0;   // the rank that decides for all: one that still has inputs
  };
  using Announce = std::function<PassStart(int flags)>;

  // When what happened, on the monotonic clock, of the last complete pass.
  struct PassTimes {
    int64_t first_gradient_ns = 0;
    int64_t last_gradient_ns = 0;
    int64_t first_launch_ns = 0;
    int64_t complete_ns = 0;
  };

  // All ranks give equal parameters and options. Throws ConfigurationError.
  Reducer(std::vector<Parameter> parameters, std::shared_ptr<ProcessGroup> group, Options options);

  // Takes its hooks back. A pass that is not complete is reported to the peers that wait for it.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Throws ReductionError, naming the parameters, when a pass is not complete; the peers are told,
  // since they wait for it. Afterwards the reducer is broken.
  void CheckFinished();

  // Starts afresh over `group`, on all its ranks: idle, with the buckets of the beginning, which
  // are dealt anew after the next pass. Gradients stay. Tensors that an abandoned communicator may
  // still write to are left behind.
  void Reset(std::shared_ptr<ProcessGroup> group);

  // The same over the same ranks, after a failure. The buckets stay as they are: sums over more
  // than two ranks depend on them to the bit. The next pass begins with an agreement on them, and
  // all ranks return to the buckets of the beginning where some rank had not got the new ones.
  void ResetAfterFailure(std::shared_ptr<ProcessGroup> group);

  // Whether a parameter has another gradient accumulator, type, device or shape than when the hooks
  // were set: after the module's to(), or set_data(). O(parameters), and no ATen operation.
  bool ParametersChanged() const;

  // Sets hooks and buckets for the parameters as they are now, on all ranks before the same pass.
  // Gradients stay; their type and device follow the parameter's. `plan`: as in Options.
  void FollowParameters(std::optional<BucketPlan> plan);

  // Around the module's forward. `complete`: `outputs` are all tensors that the module returned.
  // Without it, or where there are none, a backward that passes no known forward belongs to this
  // one, until this one is reduced.
  void BeginForward();
  void EndForward(const std::vector<at::Tensor>& outputs, bool complete, bool synchronize);

  // Once, before the first pass; `hook` then reduces the buckets and is to divide by itself.
  void RegisterHook(std::string name, CommHook hook);
  CommHook& hook() { return comm_hook_; }  // empty: none

  // The next pass also records the order in which gradients come, and ends with new buckets. For
  // all ranks alike.
  void RequestRebuild();

  // Reduces in these buckets from the next pass on, and keeps them. Only between two passes.
  void UsePlan(BucketPlan plan);

  // Takes part in a pass of the others with zeros.
  void Shadow(int flags, int source);

  // Unset again by an empty function.
  void set_announce(Announce announce) { announce_ = std::move(announce); }
  // Called at the beginning of the first pass since the construction or Reset(), on all ranks
  // alike. May use collectives, and throw.
  void set_on_first_pass(std::function<void()> on_first_pass) {
    on_first_pass_ = std::move(on_first_pass);
  }
  // Called at the end of every pass, on the backward's thread. May throw.
  void set_on_complete(std::function<void()> on_complete) { on_complete_ = std::move(on_complete); }

  // Called with a parameter's name when its gradient comes from a backward that passes no forward
  // of this reducer: it stays on this rank. Once for each such backward.
  void set_on_bare_backward(std::function<void(const std::string&)> on_bare_backward) {
    on_bare_backward_ = std::move(on_bare_backward);
  }

  // Called when a backward comes to a forward's outputs, and at its end, good or bad, before
  // anything is done with the sums. Every backward, synchronized or not.
  struct BackwardCallbacks {
    std::function<void()> begin;
    std::function<void()> end;
  };
  void set_backward_callbacks(BackwardCallbacks callbacks) { callbacks_ = std::move(callbacks); }

  // Whether the first pass of a static graph is still to come on this rank.
  bool must_count() const { return options_.static_graph && !counted_; }
  void ForgetCounts() { counted_ = false; }

  const BucketPlan& plan() const { return buckets_->plan(); }
  std::vector<std::vector<std::string>> plan_names() const { return plan().Names(Names()); }
  const FlatBuckets& buckets() const { return *buckets_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  bool rebuilt() const { return rebuilt_; }
  const std::string& hook_name() const { return hook_name_; }
  // Of the last pass.
  const std::vector<int>& ready_order() const { return last_order_; }
  const PassTimes& times() const { return times_; }
  const std::optional<std::string>& error() const { return error_; }  // the last one
  int divisor() const { return start_.divisor; }                      // of the last pass
  int buckets_reduced() const { return buckets_reduced_; }
  std::vector<int> untouched() const;  // parameters that no rank used
  bool finds_unused() const { return options_.find_unused_parameters && !options_.static_graph; }
  // Whether the unused parameters were the same in all passes so far.
  bool can_set_static_graph() const { return can_set_static_graph_; }

 private:
  enum class State { kIdle, kCounting, kReducing, kOpen, kBroken };
  // The meaning of a gradient, by the forwards that its backward passes.
  enum class Origin { kLocal, kReduce, kReduced };
  class GradientHook;

  // BackwardWatch::Observer
  void OnBackwardBegin() override;
  void OnBackwardEnd() override;
  void OnBackwardException() override;

  void AddHooks();
  void RemoveHooks();
  void Clear(std::shared_ptr<ProcessGroup> group);
  std::vector<at::Tensor> Tensors() const;
  std::vector<std::string> Names() const;
  void LogUnused(DebugLevel least) const;
  std::vector<bool> Sparse() const;
  BucketPlan FirstPlan() const;
  void TakeFirstPlan();
  void SettlePlan();
  bool AgreeOnPlan(bool* rebuild_requested);
  void SetPlan(BucketPlan plan);

  // The hot path.
  void OnGradient(int parameter);
  void MarkReady(int parameter);
  void LaunchReadyBuckets();

  // For a gradient that comes in any other state than reducing: whether it goes into its bucket.
  bool EntersPass(int parameter);
  Origin FindOrigin(int parameter);
  Origin SearchGraphForForwards(int parameter);
  const std::shared_ptr<ForwardRecord>* ForwardOf(const torch::autograd::Node& node) const;
  bool AwaitsReduction(const ForwardRecord& forward) const;
  std::vector<int> AllParameters() const;
  int FlagsOfNextPass() const;
  void BeginPass(std::vector<int> unused);
  void BeginFirstPass();
  void PrepareCounters();
  void MarkUnused();
  void ReduceWithoutGradients();
  void CountGradient(int parameter);
  void ReduceCounted();

  void Launch(int bucket);
  void LaunchHook(int bucket);
  void MakeHookBuckets();
  void StartUsedMap();
  void FinishUsedMap();
  void AgreeOnUnused();
  void FindDroppedBuckets();
  void Finalize();
  void WaitAndCopyOut(int bucket);
  void ForgetLaunched();
  void FinishForwards();
  void RebuildBuckets(int source);
  std::vector<int> RecordedOrder() const;

  bool InPass() const {
    return state_ == State::kCounting || state_ == State::kReducing || state_ == State::kOpen;
  }
  std::string Missing() const;
  std::string NamesOfBucket(int bucket) const;
  [[noreturn]] void ThrowUnfinished();
  [[noreturn]] void ThrowReduced(int parameter) const;
  [[noreturn]] void ThrowSecondGradient(int parameter);
  // In a catch block: tells the peers, who wait for this rank, and throws what they are told.
  [[noreturn]] void Rethrow(const std::string& about);
  void Break(const std::string& reason);

  // Constant after construction.
  const std::vector<Parameter> parameters_;
  const Options options_;
  std::vector<BucketPlan::Tensor> descriptions_;
  struct Hook;
  std::vector<Hook> hooks_;
  std::vector<const torch::autograd::Node*> accumulators_;         // by parameter
  std::vector<const torch::autograd::Node*> sorted_accumulators_;  // by address

  std::shared_ptr<ProcessGroup> group_;
  CommHook comm_hook_;
  std::string hook_name_;
  Announce announce_;
  std::function<void()> on_first_pass_;
  bool first_pass_begun_ = false;
  std::function<void()> on_complete_;
  std::function<void(const std::string&)> on_bare_backward_;
  BackwardCallbacks callbacks_;

  std::unique_ptr<FlatBuckets> buckets_;
  State state_ = State::kIdle;
  std::optional<BucketPlan> given_plan_;
  bool rebuilt_ = false;
  bool rebuild_requested_ = false;
  bool unsettled_ = false;  // after a failure: other ranks may have other buckets
  std::vector<std::weak_ptr<ForwardRecord>> outstanding_;  // synchronized and not reduced

  // For a backward that comes through no watched output: the forwards that it may pass.
  uint64_t first_node_ = 0;                               // of the forward under way
  std::deque<std::shared_ptr<ForwardRecord>> recent_;     // forwards, the newest last
  std::shared_ptr<ForwardRecord> unseen_;                 // its backward may pass no known forward
  int searched_task_ = -1;                                // autograd's number of the backward
  Origin searched_origin_ = Origin::kLocal;               // and what was found for it
  std::vector<std::shared_ptr<ForwardRecord>> searched_;  // the forwards to be reduced among them
  BackwardReach reach_;                                   // of the backward under way

  // Of the pass under way. A parameter is ready when its entry equals pass_.
  struct Launched {
    Communicator::Pending pending;
    TensorFuture future;  // of the comm hook, where there is one
  };
  uint64_t pass_ = 0;
  int flags_ = 0;
  PassStart start_;
  std::vector<uint64_t> ready_pass_;
  std::vector<int> missing_;  // gradients that each bucket still waits for
  int next_bucket_ = 0;       // the first that is not launched
  std::vector<Launched> launched_;
  std::vector<std::unique_ptr<GradBucket>> hook_buckets_;  // what the comm hook gets
  std::vector<std::string> hook_names_;                    // and how messages name the call
  std::vector<int> order_;                                 // of readiness, reserved
  std::vector<std::shared_ptr<ForwardRecord>> forwards_;
  PassTimes current_times_;

  // Which parameters were used: on this rank since the last pass, and on any rank in this one.
  std::vector<uint8_t> used_;
  std::vector<int> unused_;         // by this rank, known at the beginning of the pass
  std::vector<uint8_t> untouched_;  // by all ranks
  bool untouched_known_ = false;
  Communicator::Pending used_map_;
  std::vector<uint8_t> dropped_;  // buckets that are not sent

  // Of a static graph.
  bool counted_ = false;
  std::vector<int> counts_;     // gradients of one backward
  std::vector<int> remaining_;  // of them, in this backward
  std::vector<int> last_seen_;  // when the last one came, in the first backward
  int seen_ = 0;

  std::vector<int> last_order_;
  std::vector<int> last_unused_;
  bool can_set_static_graph_ = true;
  int buckets_reduced_ = 0;
  std::optional<std::string> error_;
  PassTimes times_;

  BackwardWatch watch_{this};  // last: its hooks call into all of the above
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_H_
