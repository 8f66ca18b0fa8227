#ifndef DDP_OPTIM_ZERO_CORE_H_
#define DDP_OPTIM_ZERO_CORE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Event.h>
#include <torch/optim/optimizer.h>

#include "ddp/comm/device_proof.h"
#include "ddp/join.h"
#include "ddp/optim/gradient_scatter.h"
#include "ddp/optim/shard_state.h"
#include "ddp/optim/sharded_parameters.h"
#include "ddp/optim/value_transfer.h"
#include "ddp/optim/zero_redundancy_optimizer.h"

namespace ddp::internal {

// The collectives of a ZeroRedundancyOptimizer, and the decision after a failure whether training
// can continue. The optimizer and the functions that it gave to the model share the ownership.
// Thread-compatible.
//
// A step has these parts, in this order:
// - The rank waits for the transfers of the step before.
// - One all-reduce tells all ranks whether some rank cannot make the step, and which buckets have
//   gradients.
// - Under a Join, the ranks without inputs get options and gradients.
// - Each rank updates its part.
// - The ranks start to send the new values.
// A rank on which something throws reports a failure, so that no peer waits for it.
//
// The parameters are torn while some values of a step have been updated and others have not
// arrived. A failure in that time leaves them torn. The first step, synchronized forward, Join or
// collection of the state in the group's next incarnation asks all ranks whether their parameters
// are torn. If so, it throws on all ranks. On a stream device, the host learns only in the next
// step that the values have arrived: until then, a failure counts as one in that time.
class ZeroCore {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  ZeroCore(OptimizerFactory make, std::shared_ptr<ProcessGroup> group,
           const ZeroRedundancyOptions& options);
  ~ZeroCore();

  // Throws ConfigurationError on all ranks when some rank has an `error`, or the ranks differ in
  // `groups`, the options or `scatter`. Collective.
  void Agree(const Groups& groups, const std::string& error, bool scatter);

  // Adds the groups from number `first` on.
  void Add(const Groups& groups, size_t first);

  // Makes the model scatter its gradients. Collective.
  void InstallScatter(DataParallelHandle model);

  // Waits for the transfers of an earlier step, and asks all ranks after a failure. Collective.
  // Throws what a collective throws, and what Wait() throws.
  void FinishEarlier(const char* what);

  // `round`: of a Join, also on a rank that has joined; null without a Join.
  void Step(Groups& groups, const JoinRound* round);
  // Finds out whether a failure before the Join has left torn parameters. Collective.
  void BeginJoin();
  void FinishJoin(Groups& groups, bool is_last_joiner, int last_joiner);

  void OnForward(bool collective);
  void Wait();
  double ClipGradNorm(double max_norm, bool under_join);

  // Collects the whole state on rank `to`; on all ranks with -1. Returns null elsewhere.
  std::unique_ptr<torch::optim::Optimizer> Collect(const Groups& groups, int to);
  // The two halves of ShardedOptimizer's collection, for a checkpoint.
  std::unique_ptr<torch::optim::Optimizer> DescribeState(const Groups& groups);
  void FillState(torch::optim::Optimizer& whole, const std::vector<bool>& needed);
  std::unique_ptr<torch::optim::Optimizer> MakePlain(const Groups& groups) const;
  // Returns the function that puts this rank's part of the state and the options in place.
  std::function<void()> PrepareState(const torch::optim::Optimizer& whole, Groups& groups);

  // Calls `function`. Reports what it throws to the peers, unless all ranks find out themselves.
  void Guard(const char* what, const std::function<void()>& function) const;

  const std::shared_ptr<ProcessGroup>& group() const { return group_; }
  const ShardedParameters& parameters() const { return parameters_; }
  const torch::optim::Optimizer& inner() const { return *inner_; }
  // Returns a number that rises with each step, each new group and each loaded state.
  int64_t version() const { return version_; }
  GradientScatter* scatter() const { return scatter_.get(); }  // null: gradients are averaged

 private:
  // The facts that all ranks know at the beginning of a step or a collection.
  struct Start {
    std::string error;  // some rank cannot make the step; empty: all can
    bool torn = false;
    std::vector<bool> buckets;  // with gradients on some rank
    bool publish = false;       // the ranks must publish where their parameters lie

    void ThrowError() const;
  };

  // What is known of the values of the last step.
  enum class Values {
    kWhole,       // all have arrived
    kOnTheirWay,  // between this rank's update and the arrival of all values
    kUnproven,    // the device knows that all have arrived, and the host only if proof_ tells it
    kTorn,        // a failure came in that time, on some rank
  };

  void WatchContexts(const Groups& groups, size_t first);
  std::vector<StatePart> MyState() const;
  void BeginCollection(const Groups& groups);
  int64_t Problem(const Groups& groups, bool stepping) const;
  std::string Explain(int64_t problem, int rank) const;
  Start Exchange(const Groups& groups, bool stepping, bool takes_options = false);
  bool RunsAhead() const;
  Start StartAhead(const Groups& groups);
  void CompareRates(const Groups& groups);
  void GuardStep(const std::function<void()>& function);
  void Update(Groups& groups, const JoinRound* round, const std::vector<bool>& buckets);
  void FollowIncarnation();
  void AskAll();
  std::unique_ptr<torch::optim::Optimizer> CollectState(const Groups& groups, int to,
                                                        StateContent content);

  const OptimizerFactory make_;
  const std::shared_ptr<ProcessGroup> group_;
  const ZeroRedundancyOptions options_;
  ShardedParameters parameters_;
  ValueTransfer transfer_;  // before the fields above end, it waits for peers
  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::shared_ptr<GradientScatter> scatter_;
  int64_t incarnation_ = 0;  // of the group, as known here
  // Invariant: kWhole where there is one rank.
  Values values_ = Values::kWhole;
  DeviceProof proof_;  // null: the values are not on their way yet
  // Some backward since the last step kept its gradients in a distributed autograd context. Hooks
  // of the parameters share the flag; they run on any thread.
  const std::shared_ptr<std::atomic<bool>> in_context_;
  std::string different_;  // why the ranks cannot go on together; empty: they can
  // All ranks' learning rates of the last steps, on their way from the device.
  struct Rates {
    at::Tensor words;  // of the host; RatesOf() of each rank
    c10::Event arrived;
  };
  std::deque<Rates> rates_;
  int64_t version_ = 0;
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_ZERO_CORE_H_
