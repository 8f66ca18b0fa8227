#ifndef DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm_hook.h"
#include "ddp/logging_data.h"
#include "ddp/options.h"
#include "ddp/tensor_traversal.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddp {

class Joinable;
class ProcessGroup;

namespace internal {

class DataParallelCore;

// A class that TORCH_MODULE made: a holder of a module.
template <typename T>
concept ModuleHolder = requires(const T& holder) {
  typename T::ContainedType;
  holder.ptr();
};

// DistributedDataParallel without the module's type. Every function throws ConfigurationError for
// an empty wrapper.
class DataParallelHandle {
 public:
  // While the guard lives, backwards of forwards made under it accumulate gradients on this rank
  // only. The first synchronized backward afterwards averages what has gathered:
  //   {
  //     auto guard = model.no_sync();
  //     loss(model.forward(first)).backward();
  //   }
  //   loss(model.forward(second)).backward();
  // The wrapper may be moved, and may end, while the guard lives.
  class [[nodiscard]] NoSyncGuard {
   public:
    NoSyncGuard(std::shared_ptr<DataParallelCore> core, bool active);
    ~NoSyncGuard();
    NoSyncGuard(const NoSyncGuard&) = delete;
    NoSyncGuard& operator=(const NoSyncGuard&) = delete;

   private:
    const std::shared_ptr<DataParallelCore> core_;
    const bool before_;
  };
  // In a loop, `active` says which iterations are meant: no_sync(i + 1 < n).
  NoSyncGuard no_sync(bool active = true);

  // Copies rank 0's buffers to all ranks now: before an evaluation on all of them, say. A
  // collective.
  void sync_buffers();

  // Reduces gradients with `hook` instead of a plain average: `hook(state, bucket)` returns a
  // future of the reduced tensor, like the bucket's buffer, and divides by itself. `state` is
  // anything that can be copied, usually a shared_ptr; the model keeps it. Once, before the first
  // backward, on all ranks alike. See comm_hook.h, and default_hooks.h for those that exist. The
  // first backward compares the hooks' names over the ranks, and throws ConfigurationError on all
  // of them where they differ. Without a `name` it is that of the function in default_hooks.h, or
  // "custom".
  template <typename State, typename Hook>
  void register_comm_hook(State state, Hook hook, const std::string& name = "") {
    CommHookFunction function = nullptr;
    if constexpr (std::is_same_v<Hook, CommHookFunction>) function = hook;
    RegisterCommHook(name, function, BindCommHook(std::move(state), std::move(hook)));
  }

  // Keeps buffers in step with `hook(state, buffers by name)`, called before or after every
  // synchronized forward, in train() and in eval(), instead of by a broadcast. The backward waits
  // for the futures that it returns.
  template <typename State, typename Hook>
  void register_buffer_comm_hook(
      State state, Hook hook,
      BufferCommHookLocation location = BufferCommHookLocation::kPreForward) {
    RegisterBufferCommHook(BindBufferCommHook(std::move(state), std::move(hook)), location);
  }

  // Throws ReductionError, naming the parameters without a gradient, when a reduction has begun and
  // is not complete: for a program that wants to know at once. The next forward checks the same.
  void check_finished();

  // The next synchronized backward also records the order in which gradients come, and ends with
  // new buckets: for a graph that has changed. On all ranks before the same backward.
  void rebuild_buckets();

  // Goes on over other ranks, with parameters, gradients and options as they are. On all ranks of
  // `group`; a rank that is new there constructs its model with init_sync=false, after it has got
  // the state from somewhere. A hook whose state is the old group gets the new one as its state.
  // Throws as the constructor, and ConfigurationError when a hook has any other state.
  void update_process_group(std::shared_ptr<ProcessGroup> group);

  // The parameter names of each bucket, in the order of reduction. A checkpoint keeps them: see
  // DistributedDataParallelOptions::bucket_layout. The model rebuilds its buckets once, at the end
  // of the first synchronized backward (not with find_unused_parameters: see rebuild_buckets).
  std::vector<std::vector<std::string>> bucket_layout() const;

  // Reduces in these buckets from the next backward on, as with the option of the same name: for a
  // model that was wrapped before its checkpoint was restored. Collective, with equal layouts on
  // all ranks. Throws ConfigurationError when the layout does not fit the model, differs between
  // the ranks, or a Join is active, and ReductionError in the middle of a reduction.
  void set_bucket_layout(std::vector<std::vector<std::string>> layout);

  // The ranks over which the model averages.
  std::shared_ptr<ProcessGroup> process_group() const;

  // The module, without its type.
  torch::nn::Module& base_module() const;

  // Properties and times of the model. logging_data().to_json() is for a log.
  DDPLoggingData logging_data() const;

  // Times are taken in the first 10 iterations and then in every `iterations`-th. Unset: 100.
  void set_logging_sample_rate(int64_t iterations);

  // A table of the model's buckets for a person to read.
  std::string describe() const;

  // The model's joinable. A ddp::Join takes `&model` for it. The pointer stays valid when the
  // wrapper moves.
  Joinable* joinable() const;

  // False for a wrapper of nullptr, and for a wrapper that the program has moved from.
  explicit operator bool() const { return core_ != nullptr; }

 protected:
  DataParallelHandle() = default;
  DataParallelHandle(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ProcessGroup> group,
                     const DistributedDataParallelOptions& options);
  DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                     const DistributedDataParallelOptions& options);

  void CheckNotEmpty() const;

  // The core's part of a forward, around the module's own.
  void BeforeForward();
  void AfterForward(const std::vector<at::Tensor>& outputs, bool complete);
  void OnForwardException();
  bool PlacesInputs() const;
  at::Tensor PlaceInput(const at::Tensor& input) const;
  bool PlacesOutputs() const;
  at::Tensor PlaceOutput(const at::Tensor& output) const;

 private:
  DataParallelCore& Core() const;
  void RegisterCommHook(const std::string& name, CommHookFunction function, CommHook hook);
  void RegisterBufferCommHook(BufferCommHook hook, BufferCommHookLocation location);

  std::shared_ptr<DataParallelCore> core_;
};

}  // namespace internal

// Trains one module on all ranks of a process group as if on one: every rank runs forward and
// backward on its own share of the batch, and when backward() returns every rank has the average of
// all ranks' gradients.
//
//   auto group = ddp::init_process_group();
//   Net net;  // a TORCH_MODULE holder, or a std::shared_ptr to a module
//   ddp::DistributedDataParallel model(net, group);
//   torch::optim::SGD optimizer(model->parameters(), 0.1);
//   for (...) {
//     optimizer.zero_grad();
//     loss(model->forward(inputs), targets).backward();  // gradients are averaged in here
//     optimizer.step();                                  // the same step on every rank
//   }
//
// The wrapper stands where the module stood:
// - model->forward(x), model.forward(x) and model(x) are the synchronized forward. `->` gives the
//   wrapper itself, so `.` and `->` are the same everywhere.
// - parameters(), train(), to() and the other functions of torch::nn::Module below act on the
//   module. Names have no prefix: a state that the wrapper saves fits the bare module, and the
//   other way round. torch::save(model, path) and torch::load(model, path) work.
// - model.module() is the module itself, with everything else that it has. Its own forward is not
//   synchronized: gradients of its outputs stay on this rank.
//
// A wrapper is a handle, as LibTorch's module holders and tensors are. Copies share one model, and
// the last copy destroys it. A wrapper may be a member, a return value and an element of a
// container; a member that gets its model later begins as `{nullptr}`.
// DistributedDataParallel<Net>, by the holder's name, and DistributedDataParallel<NetImpl> convert
// to each other.
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
// Thread-compatible, copies included.
template <typename Module>
class DistributedDataParallel : public internal::DataParallelHandle {
 public:
  // An empty wrapper: for a member that gets its model later.
  DistributedDataParallel(std::nullptr_t) {}

  DistributedDataParallel(std::shared_ptr<Module> module, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : DataParallelHandle(module, std::move(group), options), module_(std::move(module)) {}

  // As above, with the group or mesh in the options.
  DistributedDataParallel(std::shared_ptr<Module> module,
                          const DistributedDataParallelOptions& options)
      : DataParallelHandle(module, options), module_(std::move(module)) {}

  // From TORCH_MODULE's holders.
  template <internal::ModuleHolder Holder>
  DistributedDataParallel(const Holder& holder, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}
  template <internal::ModuleHolder Holder>
  DistributedDataParallel(const Holder& holder, const DistributedDataParallelOptions& options)
      : DistributedDataParallel(holder.ptr(), options) {}

  // The module's own forward, with whatever it takes and returns: nothing, a tensor, a container or
  // plain struct of tensors, or anything that ddp/tensor_traversal.h can look into.
  template <typename... Inputs>
  auto forward(Inputs&&... inputs) {
    CheckNotEmpty();
    try {
      return Run(std::forward<Inputs>(inputs)...);
    } catch (...) {
      OnForwardException();  // the peers wait for this rank
      throw;
    }
  }

  template <typename... Inputs>
  auto operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }

  DistributedDataParallel* operator->() { return this; }
  const DistributedDataParallel* operator->() const { return this; }

  // The module itself; null in an empty wrapper.
  const std::shared_ptr<Module>& module() const { return module_; }

  // ---- torch::nn::Module's functions, on the module.

  auto parameters(bool recurse = true) const { return Bare().parameters(recurse); }
  auto named_parameters(bool recurse = true) const { return Bare().named_parameters(recurse); }
  auto buffers(bool recurse = true) const { return Bare().buffers(recurse); }
  auto named_buffers(bool recurse = true) const { return Bare().named_buffers(recurse); }
  auto modules(bool include_self = true) const { return Bare().modules(include_self); }
  auto named_modules(const std::string& name_prefix = "", bool include_self = true) const {
    return Bare().named_modules(name_prefix, include_self);
  }
  auto children() const { return Bare().children(); }
  auto named_children() const { return Bare().named_children(); }
  const std::string& name() const { return Bare().name(); }
  bool is_training() const { return Bare().is_training(); }

  void train(bool on = true) { Bare().train(on); }
  void eval() { Bare().eval(); }
  void zero_grad(bool set_to_none = true) { Bare().zero_grad(set_to_none); }
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) {
    Bare().to(device, dtype, non_blocking);
  }
  void to(at::ScalarType dtype, bool non_blocking = false) { Bare().to(dtype, non_blocking); }
  void to(at::Device device, bool non_blocking = false) { Bare().to(device, non_blocking); }
  // Takes every function that torch::nn::Module::apply() takes.
  template <typename Function>
  void apply(Function&& function) {
    Bare().apply(std::forward<Function>(function));
  }
  template <typename Function>
  void apply(Function&& function, const std::string& name_prefix) {
    Bare().apply(std::forward<Function>(function), name_prefix);
  }
  void save(torch::serialize::OutputArchive& archive) const { Bare().save(archive); }
  // load() changes this rank only. Load the same archive on every rank.
  void load(torch::serialize::InputArchive& archive) { Bare().load(archive); }

  // For torch::save and torch::load.
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const DistributedDataParallel& model) {
    model.save(archive);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    DistributedDataParallel& model) {
    model.load(archive);
    return archive;
  }
  // Prints the module.
  friend std::ostream& operator<<(std::ostream& stream, const DistributedDataParallel& model) {
    return stream << model.Bare();
  }

 private:
  Module& Bare() const {
    CheckNotEmpty();
    return *module_;
  }

  template <typename... Inputs>
  auto Run(Inputs&&... inputs) {
    using Outputs = decltype(RunModule(std::forward<Inputs>(inputs)...));
    BeforeForward();
    if constexpr (std::is_void_v<Outputs>) {
      RunModule(std::forward<Inputs>(inputs)...);
      AfterForward({}, /*complete=*/true);
    } else {
      Outputs outputs = RunModule(std::forward<Inputs>(inputs)...);
      if constexpr (may_hold_tensors_v<Outputs>) {
        if (PlacesOutputs()) {
          for_each_tensor(outputs, [&](at::Tensor& tensor) { tensor = PlaceOutput(tensor); });
        }
      }
      std::vector<at::Tensor> tensors;
      for_each_tensor(std::as_const(outputs), [&](const at::Tensor& tensor) {
        if (tensor.defined()) tensors.push_back(tensor);
      });
      AfterForward(tensors, /*complete=*/!may_hide_tensors_v<Outputs>);
      return outputs;
    }
  }

  template <typename... Inputs>
  auto RunModule(Inputs&&... inputs) {
    if (PlacesInputs()) return module_->forward(Place<Inputs>(inputs)...);
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
        if (tensor.defined()) tensor = PlaceInput(tensor);
      });
      return placed;
    } else {
      return std::forward<Input>(input);
    }
  }

  std::shared_ptr<Module> module_;
};

// The same wrapper, by the name of the module's holder.
template <internal::ModuleHolder Holder>
class DistributedDataParallel<Holder>
    : public DistributedDataParallel<typename Holder::ContainedType> {
  using OfModule = DistributedDataParallel<typename Holder::ContainedType>;

 public:
  using OfModule::OfModule;
  DistributedDataParallel(const OfModule& other) : OfModule(other) {}
  DistributedDataParallel(OfModule&& other) : OfModule(std::move(other)) {}
};

template <internal::ModuleHolder Holder>
DistributedDataParallel(const Holder&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<Holder>;

template <internal::ModuleHolder Holder>
DistributedDataParallel(const Holder&, std::shared_ptr<ProcessGroup>,
                        const DistributedDataParallelOptions& = {})
    -> DistributedDataParallel<Holder>;

}  // namespace ddp

#endif  // DDP_DISTRIBUTED_DATA_PARALLEL_H_
