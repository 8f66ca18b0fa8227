#ifndef DDP_REDUCER_PASS_PASS_CORE_H_
#define DDP_REDUCER_PASS_PASS_CORE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/pass/forward_history.h"
#include "ddp/reducer/pass/forward_record.h"
#include "ddp/reducer/pass/pass_parts.h"

namespace ddp::internal {

// One thing that the reducer has to do. The index is a parameter or a bucket, as the comment says.
struct PassAction {
  enum class Kind : uint8_t {
    kSearchForward,   // can the forward's outputs reach a parameter? -> OnForwardSearched()
    kBareBackward,    // (parameter) warn that its gradient stays on this rank
    kCallAtEnd,       // call OnBackwardEnd() when the backward under way has ended
    kAnnounce,        // announce the pass to the joined ranks -> OnAnnounced()
    kFirstPass,       // run the callback of the first pass -> OnFirstPassReady()
    kAgreeOnPlan,     // compare the buckets over the ranks -> OnPlanAgreed()
    kTakeFirstPlan,   // return to the buckets of the beginning -> SetPlan(), OnFirstPlanTaken()
    kBegin,           // forget the last pass; set the factor of the gradients
    kWarnAllUsed,     // warn that find_unused_parameters is set for nothing
    kLogUnused,       // log the unused parameters
    kZero,            // (bucket) fill it with zeros
    kCopyIn,          // (parameter) put its gradient into its bucket
    kFinishCopyIn,    // (bucket) all of its gradients have come
    kLaunch,          // (bucket) start its reduction
    kSkip,            // (bucket) in place of kLaunch: no rank uses it
    kStartUsedMap,    // start the sum of used_map()
    kWaitUsedMap,     // wait for the sum -> OnUsedMap()
    kAttachUsedMap,   // (bucket) used_map() travels with its kLaunch, which is the next action
    kTakeUsedMap,     // (bucket) wait for its reduction, and take the sum -> OnUsedMap()
    kFinishAtEnd,     // call Finish() when the backward under way has ended
    kHold,            // the pass is complete only after OnFinalize(), at any later time
    kNextRound,       // (bucket) wait for its last round, and start its round `round`
    kWait,            // (bucket) wait for its reduction
    kWaitAndCopyOut,  // (bucket) the same, and make the sums the parameters' gradients
    kDiscard,         // (bucket) leave the gradients as they are
    kForgetLaunched,  // release the reductions
    kRebuild,         // agree on new buckets -> SetPlan()
    kComplete,        // the pass is complete -> OnComplete(), before the callback
    kReport,          // report error() to the other ranks
    kReportAndThrow,  // report error() to the other ranks, and throw it
    kThrow,           // throw message()
  };
  // The part of a pass that an exception of the action belongs to.
  enum class Part : uint8_t { kBegin, kGradient, kEnd, kShadow };

  Kind kind;
  Part part = Part::kBegin;
  int index = -1;
  int cause = -1;  // kGradient: the parameter whose gradient brought the action about
  int round = 0;   // kNextRound: of the bucket's reduction, from 1; kLaunch is round 0
};

// The decisions of the reducer: what becomes of a gradient, when a bucket is launched, when a pass
// is complete, what is an error.
//
// A *pass* is one reduction of all gradients. A pass begins with the first gradient of a backward
// of a synchronized forward. With find_unused_parameters, it also begins when a forward or its
// backward reaches no parameter. The pass is complete when every parameter has contributed. The
// backward that began the pass may end earlier, and another backward may continue the pass.
//
//   state      a gradient                                   leaves the state
//   idle       begins a pass, or accumulates on this rank   first of a pass -> reducing, or
//              only, or is an error: see ForwardHistory     -> counting (static graph, first time)
//   counting   is counted                                   backward's end -> reducing -> idle
//   reducing   goes into its bucket                         backward's end -> idle after the last
//                                                           gradient of the pass, else -> open
//   open       continues the pass, or accumulates on        continues the pass -> reducing
//              this rank only, or is an error
//   gathering  is noted                                     backward's end -> reducing -> idle when
//                                                           all gradients have come, else ->
//                                                           gathered
//   gathered   as in the state open                         continues -> gathering
//   held       is an error                                  OnFinalize() -> idle
//   broken     is an error                                  Reset() -> idle
//
// A pass that the program finalizes itself (SetManual()) is held where it would be complete: its
// buckets are launched, and the backward has ended.
//
// The reducer calls an On...() function for each event. It then takes the actions from Next() until
// there are none, and does each before it takes the next one. An action with an arrow above is a
// question: the reducer answers by the named function before it takes the next action. After an
// exception of an action the reducer calls Abandon(). It calls Break() first when other ranks wait
// for this pass.
//
// Ranks with equal parameters, options, plans and rounds do kAgreeOnPlan, kStartUsedMap, kLaunch,
// kNextRound and kRebuild in the same order, whatever the order of their gradients. The callbacks
// of kAnnounce and kFirstPass may come first with collectives of their own. The collectives of a
// pass are then, on every rank:
// - [kAgreeOnPlan, after a failure]
// - [kStartUsedMap, when unused buckets are skipped]
// - kLaunch for each bucket, in plan order
// - [kStartUsedMap, with find_unused_parameters or in the first pass of a static graph; none when
//   the last bucket carries the map, see SetMapCarrier()]
// - for each further round of the reduction: [kNextRound for each launched bucket, in plan order]
// - [kRebuild, in a pass that rebuilds the buckets: the Reducer's collectives for it, the same on
//   every rank]
//
// A model may have collectives of its own in the backward (SyncBatchNorm), in an order that is the
// same on every rank. Buckets are launched among them, at places that gradients decide. So three
// kinds of passes begin at the end of the backward that brings the last gradient, after all
// collectives of the model: passes that a Join announces, passes with find_unused_parameters, and
// the first pass after a failure. The states gathering and gathered come before such a pass.
//
// Pure: no tensor, no thread, no clock, no network. OnGradient() in the state reducing is the hot
// path: it touches arrays only, and allocates nothing. Thread-compatible. The method is that of
// PyTorch's DDP (Li et al., VLDB 2020).
class PassCore {
 public:
  struct Options {
    bool find_unused_parameters = false;
    bool static_graph = false;
    bool skip_unused_buckets = false;
    bool collectives_in_backward = false;  // the model has collectives of its own in the backward
  };

  // The facts of a pass that the ranks agree on at its beginning.
  struct Start {
    int divisor = 1;  // the sums are divided by it
    int source = 0;   // the rank that decides for all: one that still has inputs
  };

  PassCore(std::vector<std::string> parameter_names, Options options);

  // ---- Between passes.

  // Returns to idle. `unsettled`: after a failure, when other ranks may have other buckets; the
  // next pass begins with an agreement on them.
  void Reset(int rank, bool unsettled);
  // Which buckets the reducer has, and whether the next pass ends with new ones (kRebuild). With
  // find_unused_parameters only a request rebuilds. After a failure, the next pass begins with an
  // agreement on the buckets (kAgreeOnPlan), and other ranks may still have those of the beginning.
  //
  //   state      buckets                          the next pass rebuilds   after a failure
  //   kFirst     of the beginning                 always                   always
  //   kGiven     the caller's own, also rebuilt   on request               on request
  //   kRebuilt   in the order of gradients        on request               unless all have them
  enum class PlanState : uint8_t { kFirst, kGiven, kRebuilt };
  // Sets the buckets from now on. kRebuilt answers kRebuild, and leaves kGiven as it is.
  void SetPlan(const BucketPlan& plan, PlanState state);
  // Sets the number of rounds that the reduction of a bucket takes, at least 1. All ranks set the
  // same number, before the first pass.
  void SetRounds(int rounds);
  // `carries`: the reduction of the last bucket can also sum used_map(). A map that follows the
  // buckets then has no collective of its own: kAttachUsedMap and kTakeUsedMap take the place
  // of kStartUsedMap and kWaitUsedMap. All ranks set the same, between passes, for each plan.
  void SetMapCarrier(bool carries) { map_carrier_ = carries; }
  // Passes are announced to joined ranks from now on, or no longer. Call it between passes.
  void SetAnnounced(bool announced) { announced_ = announced; }
  // Passes end by OnFinalize() from now on, or by themselves. Adds an error within a pass.
  void SetManual(bool manual);
  // Makes the next pass end with new buckets, and count a static graph anew.
  void RequestRebuild();
  void ForgetCounts() { counted_ = false; }

  // ---- Events. Each may add actions.

  // A forward has ended. `seen`: see ForwardHistory::Add().
  void OnForwardEnd(const ForwardPtr& forward, bool seen);
  void OnForwardSearched(bool reaches_a_parameter);
  // A gradient of `parameter` has been accumulated. `defined`: the parameter has a gradient now.
  // `backward` is looked at only while asks_backward().
  void OnGradient(int parameter, bool defined, const BackwardView& backward);
  // The short form of OnGradient(), for a gradient that neither completes a bucket nor is an error
  // nor asks for anything else. Returns true when the caller has to do kCopyIn(parameter) and
  // nothing else, with the part kGradient. Returns false, and changes nothing, when the caller has
  // to call OnGradient().
  bool OnPlainGradient(int parameter, bool defined) {
    if (state_ != State::kReducing || next_action_ != actions_.size()) return false;
    if (counted_ && remaining_[parameter] != 1) return false;
    int& missing = missing_[bucket_of_[parameter]];
    if (ready_pass_[parameter] == pass_ || missing <= 1 || dropped_[bucket_of_[parameter]] != 0) {
      return false;
    }
    ready_pass_[parameter] = pass_;
    used_[parameter] |= static_cast<uint8_t>(defined);
    if (counted_) remaining_[parameter] = 0;
    order_.push_back(parameter);  // reserved
    --missing;
    return true;
  }
  void OnBackwardEnd(const BackwardView& backward);
  void OnBackwardException(const BackwardView& backward);
  void OnAnnounced(Start start);
  void OnFirstPassReady();
  void OnPlanAgreed(bool equal, bool rebuild_requested);
  void OnFirstPlanTaken() { Begin(); }
  // `sums`: how many ranks use each parameter. Empty: every parameter is used.
  void OnUsedMap(const std::vector<int32_t>& sums);
  // All gradients have come, and the backward has ended.
  void Finish();
  // The program finalizes the pass. `within`: it may do so within the backward too, once all
  // gradients have come. Adds an error when there is nothing to finalize.
  void OnFinalize(bool within);
  // The pass is complete. To be called before the callback of kComplete; `passed`: the synchronized
  // forwards of a backward that is still under way.
  void OnComplete(const std::vector<ForwardPtr>& passed);
  // Under a Join, this rank has no inputs: it takes part in a pass of the others with zeros.
  // `start` is what the others have agreed on. Call it between passes only.
  void OnShadow(PassParts parts, Start start);
  // Adds an error when a pass is not complete.
  void OnCheck();
  // The model is destroyed. Adds a report when a pass is not complete.
  void OnDestruction();

  // The next action; nothing when the event is dealt with.
  std::optional<PassAction> Next();
  // Drops the remaining actions, after an exception.
  void Abandon();
  // Makes the state broken and drops the remaining actions: an action threw, or the caller found an
  // error.
  void Break(std::string error);

  // ---- State.

  bool asks_backward() const { return state_ == State::kIdle || between_backwards(); }
  bool broken() const { return state_ == State::kBroken; }
  bool manual() const { return manual_; }
  // Returns true when the pass that is under way, or the next one, needs the end of its backward.
  bool ends_after_backward() const {
    const PassParts parts = in_pass() ? parts_ : PartsOfNextPass();
    return parts.rebuild_after || must_count() || begins_at_end() || unsettled_;
  }
  bool finds_unused() const { return options_.find_unused_parameters && !options_.static_graph; }
  int rounds() const { return rounds_; }
  bool must_count() const { return options_.static_graph && !counted_; }
  PlanState plan_state() const { return plan_state_; }
  bool rebuilt() const { return plan_state_ != PlanState::kFirst; }
  bool rebuild_requested() const { return rebuild_requested_; }
  bool can_set_static_graph() const { return can_set_static_graph_; }
  int64_t passes() const { return static_cast<int64_t>(pass_); }
  const Start& start() const { return start_; }                       // of the last pass
  const PassParts& parts() const { return parts_; }                   // of the last pass
  int buckets_reduced() const { return buckets_reduced_; }            // of the last complete pass
  const std::vector<int>& last_order() const { return last_order_; }  // of the last complete pass
  const std::vector<int>& unused() const { return unused_; }          // by this rank, in this pass
  const std::vector<uint8_t>& untouched() const { return untouched_; }  // by all ranks
  // Returns true when untouched() holds for this pass: those gradients stay as they are.
  bool untouched_is_known() const {
    return parts_.used_map_after || parts_.used_map_before || untouched_known_;
  }
  const std::vector<uint8_t>& used_map() const { return used_map_; }
  // Returns true when OnUsedMap() needs the numbers. Otherwise the host need not wait for a GPU.
  bool wants_used_map() const;
  // Returns the order in which gradients came, each parameter once, for new buckets.
  std::vector<int> RecordedOrder() const;
  // The parameters whose gradients have not come in this pass, as a list for a message. Empty: all
  // came.
  std::string Missing() const;

  const ForwardHistory& forwards() const { return forwards_; }
  const std::string& message() const { return message_; }  // of the last error that was thrown
  const std::optional<std::string>& error() const { return error_; }  // the last one of a pass

 private:
  enum class State : uint8_t {
    kIdle,
    kCounting,
    kReducing,
    kOpen,
    kGathering,
    kGathered,
    kHeld,
    kBroken,
  };
  // The continuation of a pass after its beginning.
  enum class Then : uint8_t { kGradient, kNoGradients, kGathered, kShadow };

  bool reducing() const { return state_ == State::kReducing || state_ == State::kCounting; }
  bool between_backwards() const { return state_ == State::kOpen || state_ == State::kGathered; }
  bool in_pass() const { return state_ != State::kIdle && state_ != State::kBroken; }
  bool begins_at_end() const {
    return options_.collectives_in_backward && (announced_ || unsettled_ || finds_unused());
  }
  void Add(PassAction::Kind kind, int index = -1) {
    actions_.push_back({.kind = kind, .part = part_, .index = index, .cause = cause_});
  }
  PassParts PartsOfNextPass() const;
  void BeginPass(std::vector<int> unused, Then then);
  void Begin();
  void NoteUnused();
  void AgreeOnUnused();
  void GoOn();
  void EnterGradient(int parameter, bool defined);
  void CountGradient(int parameter, bool defined);
  void StartGathering(const std::vector<int>& unreached);
  void GatherGradient(int parameter, bool defined);
  void ReduceGathered();
  void MarkReady(int parameter);
  void LaunchReadyBuckets();
  void ReduceCounted();
  void EndPass();
  void StartUsedMap();
  bool CarriesMap(size_t bucket) const;
  void LaunchBucket(size_t bucket);
  void AddWaitForMap();
  void FindDroppedBuckets();
  void BeginShadow();
  void ShadowBuckets();
  void AddFurtherRounds();
  void Reserve();
  void EndOfPass();
  std::vector<int> AllParameters() const;
  void Fail(std::string error);
  void FailSecondGradient(int parameter);
  void ThrowOnly(std::string message);

  const std::vector<std::string> names_;
  const Options options_;
  int rank_ = 0;
  int rounds_ = 1;

  // The plan.
  std::vector<int> bucket_of_;             // by parameter
  std::vector<std::vector<int>> members_;  // by bucket
  PlanState plan_state_ = PlanState::kFirst;
  bool rebuild_requested_ = false;
  bool unsettled_ = false;  // after a failure: other ranks may have other buckets
  bool announced_ = false;
  bool map_carrier_ = false;
  bool manual_ = false;
  bool told_of_held_ = false;      // by OnCheck(), since the pass is held
  bool finalized_within_ = false;  // the backward under way has had its pass

  State state_ = State::kIdle;
  ForwardHistory forwards_;
  bool first_pass_begun_ = false;
  bool can_set_static_graph_ = true;

  // The beginning of a pass, between its questions.
  Then then_ = Then::kGradient;
  ForwardPtr searched_forward_;
  std::vector<int> next_unused_;
  bool agreeing_on_unused_ = false;
  int first_parameter_ = -1;  // Then::kGradient
  bool first_defined_ = false;
  size_t gathered_ = 0;  // kGathering: parameters that are ready, or unreached

  // The pass under way. A parameter is ready when its entry equals pass_.
  uint64_t pass_ = 0;
  PassParts parts_;
  Start start_;
  std::vector<uint64_t> ready_pass_;
  std::vector<int> missing_;      // gradients that each bucket still waits for
  size_t next_bucket_ = 0;        // the first that is not launched
  std::vector<uint8_t> dropped_;  // buckets that are not sent
  std::vector<int> order_;        // of readiness
  bool map_in_flight_ = false;
  int buckets_sent_ = 0;

  // Used parameters: on this rank since the last pass, and on any rank in this one.
  std::vector<uint8_t> used_;
  std::vector<uint8_t> used_map_;
  std::vector<int> unused_;
  std::vector<int> last_unused_;
  std::vector<uint8_t> untouched_;
  bool untouched_known_ = false;

  // Of a static graph.
  bool counted_ = false;
  std::vector<int> counts_;     // gradients of one backward
  std::vector<int> remaining_;  // of them, in this backward
  std::vector<int> last_seen_;  // when the last one came, in the first backward
  int seen_ = 0;

  // Of the last complete pass.
  std::vector<int> last_order_;
  int buckets_reduced_ = 0;

  std::string message_;
  std::optional<std::string> error_;
  PassAction::Part part_ = PassAction::Part::kBegin;
  int cause_ = -1;
  std::vector<PassAction> actions_;  // reserved: the hot path does not allocate
  size_t next_action_ = 0;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_PASS_PASS_CORE_H_
