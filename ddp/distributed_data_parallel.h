#ifndef DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/data_parallel_core.h"
#include "ddp/tensor_traversal.h"

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
// - Every trainable parameter must take part in every synchronized backward, unless
//   find_unused_parameters or static_graph is set; what is missing is an error that names the
//   parameters, at the next forward at the latest.
// - A backward goes through the outputs of one or more forwards. Each forward's outputs are reduced
//   once: together, or one after the other when they share no parameter. A further backward through
//   them is an error, never a silent local sum; under no_sync() it accumulates.
// - torch::autograd::grad() does not average. After a backward with create_graph the averaged
//   gradients are cut off from the graph.
//
// Errors: ConfigurationError (constructor: models or options that differ or are not usable),
// ReductionError (forward, backward: misuse as above), CommunicationError and PeerFailedError
// (anywhere). What goes wrong on one rank is thrown once on every rank, by the collective that
// waits for it or by the next forward; the forward after that meets the other ranks again and
// begins afresh, gradients as they are: call zero_grad(). When a rank is gone for good every
// forward throws PeerFailedError; under ddprun let that end the process, and the job goes on in a
// new generation.
//
// The wrapper shares the module with the caller, who may go on using it directly; optimizers take
// its parameters. Thread-compatible; not movable.
template <typename Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(std::shared_ptr<Module> module, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : module_(module), core_(std::move(module), WithGroup(options, std::move(group))) {}

  // From TORCH_MODULE's holders.
  template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
  DistributedDataParallel(const Holder& holder, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}

  // As above, with the group or mesh in the options.
  DistributedDataParallel(std::shared_ptr<Module> module,
                          const DistributedDataParallelOptions& options)
      : module_(module), core_(std::move(module), options) {}

  template <typename Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
  DistributedDataParallel(const Holder& holder, const DistributedDataParallelOptions& options)
      : DistributedDataParallel(holder.ptr(), options) {}

  // The module's own forward, with whatever it takes and returns: a tensor, a container or plain
  // struct of tensors, or anything that ddp/tensor_traversal.h can look into.
  template <typename... Inputs>
  auto forward(Inputs&&... inputs) {
    try {
      return Run(std::forward<Inputs>(inputs)...);
    } catch (...) {
      core_.OnForwardException();  // the peers wait for this rank
      throw;
    }
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
    NoSyncGuard(DataParallelCore& core, bool active) : core_(core), before_(core.synchronize()) {
      if (active) core_.set_synchronize(false);
    }
    ~NoSyncGuard() { core_.set_synchronize(before_); }
    NoSyncGuard(const NoSyncGuard&) = delete;
    NoSyncGuard& operator=(const NoSyncGuard&) = delete;

   private:
    DataParallelCore& core_;
    const bool before_;
  };
  // In a loop, `active` says which iterations are meant: no_sync(i + 1 < n).
  NoSyncGuard no_sync(bool active = true) { return NoSyncGuard(core_, active); }

  // Copies rank 0's buffers to all ranks now: before an evaluation on all of them, say. A
  // collective.
  void sync_buffers() { core_.SyncBuffers(); }

  // Reduces gradients with `hook` instead of a plain average: `hook(state, bucket)` returns a
  // future of the reduced tensor, like the bucket's buffer, and divides by itself. `state` is
  // anything that can be copied, usually a shared_ptr; the model keeps it. Once, before the first
  // backward, on all ranks alike. See comm_hook.h, and default_hooks.h for those that exist.
  template <typename State, typename Hook>
  void register_comm_hook(State state, Hook hook, const std::string& name = "custom") {
    core_.RegisterCommHook(name, BindCommHook(std::move(state), std::move(hook)));
  }

  // Keeps buffers in step with `hook(state, buffers by name)`, called before or after every
  // synchronized forward of a module in training, instead of by a broadcast. The backward waits
  // for the futures that it returns.
  template <typename State, typename Hook>
  void register_buffer_comm_hook(
      State state, Hook hook,
      BufferCommHookLocation location = BufferCommHookLocation::kPreForward) {
    core_.RegisterBufferCommHook(BindBufferCommHook(std::move(state), std::move(hook)), location);
  }

  // Throws ReductionError, naming the parameters without a gradient, when a reduction has begun and
  // is not complete; see also ddp::check_finished. The next forward checks the same.
  void check_finished() { core_.CheckFinished(); }

  // The next synchronized backward also records the order in which gradients come, and ends with
  // new buckets: for a graph that has changed. On all ranks before the same backward.
  void rebuild_buckets() { core_.RebuildBuckets(); }

  // Goes on over other ranks, with parameters, gradients and options as they are. On all ranks of
  // `group`; a rank that is new there constructs its model with init_sync=false, after it has got
  // the state from somewhere. Throws as the constructor.
  void update_process_group(std::shared_ptr<ProcessGroup> group) {
    core_.UpdateProcessGroup(std::move(group));
  }

  // Which parameters share a bucket, in the order of reduction, by name: for a checkpoint, see
  // DistributedDataParallelOptions::bucket_layout. Dealt anew once, at the end of the first
  // synchronized backward (not with find_unused_parameters: see rebuild_buckets).
  std::vector<std::vector<std::string>> bucket_layout() const {
    return core_.reducer().plan_names();
  }

  // What the model is and does, times included; logging_data().to_json() for a log.
  DDPLoggingData logging_data() const { return core_.LoggingData(); }

  // Times are taken in the first 10 iterations and then in every `iterations`-th. Unset: 100.
  void set_logging_sample_rate(int64_t iterations) { core_.SetLoggingSampleRate(iterations); }

  // See ddp::describe.
  std::string describe() const { return core_.Describe(); }

  // What a ddp::Join takes.
  Joinable* joinable() { return &core_; }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 private:
  template <typename... Inputs>
  auto Run(Inputs&&... inputs) {
    core_.BeforeForward();
    auto outputs = RunModule(std::forward<Inputs>(inputs)...);
    using Outputs = decltype(outputs);
    if constexpr (may_hold_tensors_v<Outputs>) {
      if (core_.places_outputs()) {
        for_each_tensor(outputs, [&](at::Tensor& tensor) { tensor = core_.PlaceOutput(tensor); });
      }
    }
    std::vector<at::Tensor> tensors;
    for_each_tensor(std::as_const(outputs), [&](const at::Tensor& tensor) {
      if (tensor.defined()) tensors.push_back(tensor);
    });
    core_.AfterForward(tensors, /*complete=*/!may_hide_tensors_v<Outputs>);
    return outputs;
  }

  template <typename... Inputs>
  auto RunModule(Inputs&&... inputs) {
    if (core_.places_inputs()) return module_->forward(Place<Inputs>(inputs)...);
    return module_->forward(std::forward<Inputs>(inputs)...);
  }

  // A copy whose tensors are where, and of the type, that the module wants. What cannot be copied
  // or holds no tensor is handed on as it is.
  template <typename Input>
  decltype(auto) Place(std::remove_reference_t<Input>& input) {
    using Value = std::remove_cvref_t<Input>;
    if constexpr (may_hold_tensors_v<Value> && std::is_copy_constructible_v<Value>) {
      Value placed = input;
      for_each_tensor(placed, [this](at::Tensor& tensor) {
        if (tensor.defined()) tensor = core_.PlaceInput(tensor);
      });
      return placed;
    } else {
      return std::forward<Input>(input);
    }
  }

  const std::shared_ptr<Module> module_;
  DataParallelCore core_;
};

// Throws ReductionError when a reduction of `model` has begun and is not complete: to be called
// where a program wants to know at once, instead of at the next forward.
template <typename Module>
void check_finished(DistributedDataParallel<Module>& model) {
  model.check_finished();
}

// A table of the model's buckets for a person to read.
template <typename Module>
std::string describe(const DistributedDataParallel<Module>& model) {
  return model.describe();
}

template <typename Holder>
DistributedDataParallel(const Holder&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<typename Holder::ContainedType>;

template <typename Holder>
DistributedDataParallel(const Holder&, std::shared_ptr<ProcessGroup>,
                        const DistributedDataParallelOptions& = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace ddp

#endif  // DDP_DISTRIBUTED_DATA_PARALLEL_H_
