#ifndef DDP_OPTIM_ZERO_REDUNDANCY_OPTIMIZER_H_
#define DDP_OPTIM_ZERO_REDUNDANCY_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "ddp/common/sharded_optimizer.h"
#include "ddp/distributed_data_parallel.h"

namespace ddp {

class Joinable;
class ProcessGroup;

namespace internal {
class ZeroCore;
}  // namespace internal

// Options of a ZeroRedundancyOptimizer. All ranks give equal options; the constructor compares
// them.
struct ZeroRedundancyOptions {
  // kEven: parameters are put into buckets, and each rank updates one contiguous slice of each
  // bucket. Right for optimizers that treat each element by itself, as all of LibTorch's do but
  // LBFGS. kWhole: each rank updates whole parameters, assigned as PyTorch does: largest first, to
  // the rank with the fewest elements. For optimizers that need whole parameters.
  enum class Shard : uint8_t { kEven, kWhole };
  Shard shard = Shard::kEven;

  // Whether the model reduce-scatters its gradients instead of averaging all of them on every rank.
  // Needs kEven, and the constructor that takes the model. Unset: yes where the backend is nccl and
  // the model has no comm hook. Gloo's reduce-scatter is an all-reduce inside. Ranks that share
  // memory average gradients where they lie, which costs less than flat buckets for a
  // reduce-scatter. true: an error where it cannot be.
  std::optional<bool> scatter_gradients = {};

  // When true, step() returns while the updated values are on their way to the other ranks. They
  // are complete after wait(). Needs the constructor that takes the model. A forward of the model
  // that the constructor got calls wait() first; so do step(), clip_grad_norm(), and all functions
  // about states. Until then, parameters have old and new values side by side: call wait() before
  // torch::save(model), before set_data() and before any other use of a parameter.
  bool overlap_with_forward = false;

  // Size in MiB at which a bucket is closed.
  double bucket_cap_mb = 25;
};

// The optimizer below, over an optimizer that a function makes.
//
// Where all ranks share memory (the backend is "shm"), the constructor and add_param_group() move
// the parameters that are trained into memory that the ranks of the host see. Tensors and all views
// follow; a pointer from data_ptr() before does not. In step(), the other ranks write into them.
class ZeroRedundancyOptimizerBase : public torch::optim::Optimizer, public ShardedOptimizer {
 public:
  // Makes a plain optimizer over parameter groups. Called several times: for this rank's part, for
  // whole states, and over one element or none.
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup> groups)>;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  // The parameters in `groups`, over the ranks of `group`.
  ZeroRedundancyOptimizerBase(Factory make, const Groups& groups,
                              std::shared_ptr<ProcessGroup> group,
                              const ZeroRedundancyOptions& options = {});
  // The parameters in `groups`, which belong to `model`, over the ranks of the model's group.
  ZeroRedundancyOptimizerBase(Factory make, const Groups& groups,
                              const internal::DataParallelHandle& model,
                              const ZeroRedundancyOptions& options = {});
  // Waits as wait() does, except while an exception unwinds the stack. Logs an error.
  ~ZeroRedundancyOptimizerBase() override;

  // Updates all parameters. Collective. `closure` computes the loss and the gradients; its result
  // is returned. Gradients must be averages over the ranks, as after a backward of the model.
  //
  // Throws ConfigurationError on every rank, before anything is changed, when on some rank:
  // - a parameter has changed its shape, type, device or strides;
  // - a gradient is sparse or unlike its parameter;
  // - a parameter group was added through the base class;
  // - the gradients of the last backward lie in an rpc::AutogradContext, and there is no .grad.
  // Throws ReductionError on every rank when an earlier step has failed in the middle: parameters
  // then have old and new values, so load a checkpoint. Throws what a collective throws, and what
  // the closure or the plain optimizer throws, after a report to the peers.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Adds a parameter group; without options, the optimizer's defaults. Collective. Earlier
  // parameters and states keep their rank. Throws ConfigurationError on every rank, and changes
  // nothing, as the constructor does. Under a Join it throws ConfigurationError on the calling rank
  // only; the others throw PeerFailedError when that exception ends the calling rank's Join. Throws
  // what wait() throws, and then changes nothing on any rank. Do not call torch::optim::Optimizer's
  // function of this name: the next step() refuses it.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Blocks until the last step's values are in all parameters. Not a collective. Throws
  // ReductionError, after a report to the peers, when a parameter got other memory since step().
  // Throws what a collective throws.
  void wait();

  // Scales all gradients so that their common 2-norm is at most `max_norm`, and returns the norm
  // before. Right with scattered gradients too, where torch::nn::utils::clip_grad_norm_ is not.
  // Collective, except under a Join. Call it between backward and step().
  double clip_grad_norm(double max_norm);

  // Collects the whole state on rank `to`, or on every rank with kAllRanks. Collective. The state
  // is in host memory for save() on that rank. It ends with the next step(), also a step of the
  // other ranks under a Join. The collection needs memory for twice the state. Throws
  // ConfigurationError on every rank when the ranks give different numbers, or a number that is no
  // rank of the group.
  static constexpr int kAllRanks = -1;
  void consolidate_state_dict(int to = 0);

  // Saves the state that consolidate_state_dict() collected, in the form of the plain optimizer,
  // which can load it. torch::save() calls it. Throws ConfigurationError on a rank without one.
  void save(torch::serialize::OutputArchive& archive) const override;

  // Loads a state that this optimizer or the plain one saved, from any number of ranks. Not a
  // collective: call it on every rank with the same archive. torch::load() calls it.
  void load(torch::serialize::InputArchive& archive) override;

  // The interface of ShardedOptimizer, for checkpoints.
  std::unique_ptr<torch::optim::Optimizer> DescribeState() override;
  void FillState(torch::optim::Optimizer& whole, const std::vector<bool>& needed) override;
  std::unique_ptr<torch::optim::Optimizer> EmptyOptimizer() const override;
  std::function<void()> PrepareState(const torch::optim::Optimizer& whole) override;

  // Returns the object for a ddp::Join; pass `&optimizer` to the Join. Ranks without inputs take
  // part in step(): they update their part with the gradients and options of a rank with inputs.
  // After the Join, all ranks have the options of the rank that had inputs longest. Under a Join,
  // gradients are not scattered. The pointer stays valid as long as the optimizer.
  Joinable* joinable() const override;

  // Returns true when the model has this optimizer's comm hook. The hook scatters the buckets that
  // the constructor gave the model; it all-reduces any others, as after rebuild_buckets().
  bool scatters_gradients() const;

  // Returns the plain optimizer over this rank's part: in kEven, rows of elements. For tests and
  // measurements; do not change it.
  const torch::optim::Optimizer& local_optimizer() const;

 protected:
  static torch::optim::OptimizerParamGroup ParametersOf(const internal::DataParallelHandle& model);

 private:
  struct Made;

  ZeroRedundancyOptimizerBase(Made made, const Groups& groups, std::shared_ptr<ProcessGroup> group,
                              const internal::DataParallelHandle* model,
                              const ZeroRedundancyOptions& options);

  const std::shared_ptr<internal::ZeroCore> core_;
  const std::unique_ptr<Joinable> joinable_;
  const int exceptions_at_start_;
  std::unique_ptr<torch::optim::Optimizer> whole_;  // the collected state; null: none
  int64_t whole_version_ = 0;                       // ZeroCore::version() of whole_
};

// An optimizer of LibTorch whose state is divided among the ranks of data-parallel training (ZeRO,
// stage 1: Rajbhandari et al., SC 2020; the interface is that of PyTorch's
// ZeroRedundancyOptimizer). Each rank keeps the state of, and updates, 1/N of the elements. The
// ranks then send each other the new values.
//
//   ddp::DistributedDataParallel model(net, group);
//   ddp::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(model,
//                                                               torch::optim::AdamWOptions(1e-3));
//   ...
//   loss(model->forward(inputs), targets).backward();
//   optimizer.step();
//
// The result is that of the plain optimizer; docs/zero.md says when all bits are equal.
//
// With scattered gradients, .grad has the average in this rank's part only: clip with
// clip_grad_norm(), and call zero_grad() between two synchronized backwards. docs/zero.md has the
// rules, also for no_sync() and an rpc::AutogradContext.
//
// The options of param_groups() may change at any time, as schedulers do, alike on all ranks.
// step() throws ConfigurationError on every rank when the learning rates differ; nothing compares
// the other options. On a device the error comes some steps later, after a report to the peers.
//
// The constructor is a collective. It throws ConfigurationError on every rank when on some rank
// there is no parameter; one is undefined, no leaf, sparse, there twice, or not on the group's
// device; the optimizer is an LBFGS; or the ranks' parameters, their strides or
// ZeroRedundancyOptions differ. Thread-compatible. The optimizer must outlive a Join; the model may
// live longer.
template <typename Plain>
class ZeroRedundancyOptimizer : public ZeroRedundancyOptimizerBase {
 public:
  template <typename Defaults>
  ZeroRedundancyOptimizer(const internal::DataParallelHandle& model, Defaults defaults,
                          const ZeroRedundancyOptions& options = {})
      : ZeroRedundancyOptimizerBase(FactoryOf(std::move(defaults)), {ParametersOf(model)}, model,
                                    options) {}
  template <typename Defaults>
  ZeroRedundancyOptimizer(const Groups& groups, Defaults defaults,
                          const internal::DataParallelHandle& model,
                          const ZeroRedundancyOptions& options = {})
      : ZeroRedundancyOptimizerBase(FactoryOf(std::move(defaults)), groups, model, options) {}

  // Without the model: it averages its gradients as always.
  template <typename Defaults>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, Defaults defaults,
                          std::shared_ptr<ProcessGroup> group,
                          const ZeroRedundancyOptions& options = {})
      : ZeroRedundancyOptimizerBase(FactoryOf(std::move(defaults)),
                                    {torch::optim::OptimizerParamGroup(std::move(parameters))},
                                    std::move(group), options) {}
  template <typename Defaults>
  ZeroRedundancyOptimizer(const Groups& groups, Defaults defaults,
                          std::shared_ptr<ProcessGroup> group,
                          const ZeroRedundancyOptions& options = {})
      : ZeroRedundancyOptimizerBase(FactoryOf(std::move(defaults)), groups, std::move(group),
                                    options) {}

 private:
  template <typename Defaults>
  static Factory FactoryOf(Defaults defaults) {
    return [defaults = std::move(defaults)](Groups groups) {
      return std::make_unique<Plain>(std::move(groups), defaults);
    };
  }
};

}  // namespace ddp

#endif  // DDP_OPTIM_ZERO_REDUNDANCY_OPTIMIZER_H_
