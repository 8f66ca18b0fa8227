#ifndef DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/data_parallel_core.h"
#include "ddp/reducer.h"

namespace ddp {

// Trains one module on all ranks of a process group as if on one: every rank runs forward and
// backward on its own share of the batch, and when backward() returns every rank has the average of
// all ranks' gradients.
//
//   auto group = ddp::init_process_group();
//   auto net = std::make_shared<Net>();            // a torch::nn::Module, or a ModuleHolder
//   ddp::DistributedDataParallel model(net, group);
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   for (...) {
//     optimizer.zero_grad();
//     loss(model.forward(inputs), targets).backward();   // gradients are averaged in here
//     optimizer.step();                                   // the same step on every rank
//   }
//
// Rules, as in PyTorch:
// - Construct it, and call forward and backward, on every rank in the same order: they are
//   collectives. A forward under torch::NoGradGuard is not and may be called on one rank alone.
// - The constructor checks that all ranks have the same model (names, order, shapes, types,
//   options) and then copies rank 0's parameters and buffers to all.
// - Gradients are averaged, not summed: scale the loss by the share of samples when shares differ.
// - Do not change the set of parameters or their requires_grad afterwards.
// - Every trainable parameter must take part in every synchronized backward, and each synchronized
//   forward is followed by one backward; anything else is an error that names the parameters.
// - torch::autograd::grad() does not average.
//
// Errors: ConfigurationError (constructor: models or options that differ or are not usable),
// ReductionError (forward, backward: misuse as above), CommunicationError and PeerFailedError
// (anywhere). After an error of communication nothing but destruction is allowed.
//
// The wrapper shares the module with the caller, who may go on using it directly; optimizers take
// its parameters. Thread-compatible; not movable.
template <typename Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(std::shared_ptr<Module> module, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : module_(module), core_(std::move(module), std::move(group), options) {}

  // From TORCH_MODULE's holders.
  template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
  DistributedDataParallel(const Holder& holder, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}

  // The module's own forward, with whatever it takes and returns.
  template <typename... Inputs>
  auto forward(Inputs&&... inputs) {
    core_.BeforeForward();
    auto outputs = module_->forward(std::forward<Inputs>(inputs)...);
    core_.AfterForward();
    return outputs;
  }

  template <typename... Inputs>
  auto operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }

  // While the guard lives, backwards of forwards made under it accumulate gradients on this rank
  // only. The first synchronized backward afterwards averages what has gathered:
  //   {
  //     auto guard = model.no_sync();
  //     loss(model.forward(first)).backward();
  //   }
  //   loss(model.forward(second)).backward();
  class [[nodiscard]] NoSyncGuard {
   public:
    explicit NoSyncGuard(DataParallelCore& core) : core_(core), before_(core.synchronize()) {
      core_.set_synchronize(false);
    }
    ~NoSyncGuard() { core_.set_synchronize(before_); }
    NoSyncGuard(const NoSyncGuard&) = delete;
    NoSyncGuard& operator=(const NoSyncGuard&) = delete;

   private:
    DataParallelCore& core_;
    const bool before_;
  };
  NoSyncGuard no_sync() { return NoSyncGuard(core_); }

  // Copies rank 0's buffers to all ranks now: before an evaluation on all of them, say. A
  // collective.
  void sync_buffers() { core_.SyncBuffers(); }

  // Which parameters share a bucket, in the order of reduction, by name: for a checkpoint, see
  // DistributedDataParallelOptions::bucket_layout. Dealt anew once, at the end of the first
  // synchronized backward.
  std::vector<std::vector<std::string>> bucket_layout() const {
    return core_.reducer().plan_names();
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 private:
  const std::shared_ptr<Module> module_;
  DataParallelCore core_;
};

template <typename Holder>
DistributedDataParallel(const Holder&, std::shared_ptr<ProcessGroup>,
                        const DistributedDataParallelOptions& = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace ddp

#endif  // DDP_DISTRIBUTED_DATA_PARALLEL_H_
