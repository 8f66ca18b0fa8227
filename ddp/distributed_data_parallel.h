#ifndef DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm_hook.h"
#include "ddp/logging_data.h"
#include "ddp/options.h"
#include "ddp/tensor_traversal.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit
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

class ModelSynchronizer;
class ModelView;

// True for a module holder: a class that LibTorch's TORCH_MODULE macro made.
template <typename T>
concept ModuleHolder = requires(const T& holder) {
  typename T::ContainedType;
  holder.ptr();
};

// The part of DistributedDataParallel that does not depend on the module's type. A program uses it
// through the derived class below. Copies share one model, whose synchronization ends with the last
// copy. Every function except operator bool throws ConfigurationError for an empty wrapper.
// Thread-compatible.
class DataParallelHandle {
 public:
  // A guard that switches gradient averaging off while it lives. A forward made under the guard is
  // not synchronized: its backward accumulates gradients on this rank only. The next synchronized
  // backward averages the accumulated gradients together with its own:
  //   {
  //     auto guard = model.no_sync();
  //     loss(model.forward(first)).backward();
  //   }
  //   loss(model.forward(second)).backward();
  // The wrapper may be moved or destroyed while the guard lives.
  class [[nodiscard]] NoSyncGuard {
   public:
    NoSyncGuard(std::shared_ptr<ModelSynchronizer> synchronizer, bool active);
    ~NoSyncGuard();
    NoSyncGuard(const NoSyncGuard&) = delete;
    NoSyncGuard& operator=(const NoSyncGuard&) = delete;

   private:
    const std::shared_ptr<ModelSynchronizer> synchronizer_;
    const bool before_;
  };
  // Returns a guard; with active=false the guard changes nothing. In a loop that averages in the
  // last of n iterations only: no_sync(i + 1 < n).
  NoSyncGuard no_sync(bool active = true);

  // Copies rank 0's buffers to all ranks now, for example before all ranks evaluate. Collective:
  // call it on every rank. Ignores a registered buffer hook.
  void sync_buffers();

  // Reduces gradients with `hook` instead of the built-in average. `hook(state, bucket)` returns a
  // future of the reduced tensor, which must be like the bucket's buffer. The hook divides; the
  // library does not. `state` is any copyable value, usually a shared_ptr; the model keeps it. See
  // comm_hook.h, and default_hooks.h for the built-in hooks.
  //
  // Call it at most once, before the first backward, and with the same hook on all ranks. Throws
  // ConfigurationError when called again or later, and when mixed_precision sets param_dtype or
  // reduce_dtype. `name` defaults to the function's name for allreduce_hook, fp16_compress_hook and
  // bf16_compress_hook, else to "custom". The first backward compares the names and throws
  // ConfigurationError on all ranks when they differ.
  template <typename State, typename Hook>
  requires(!std::is_same_v<State, CommHookRounds>) void register_comm_hook(
      State state, Hook hook, const std::string& name = "") {
    CommHookFunction function = nullptr;
    if constexpr (std::is_same_v<Hook, CommHookFunction>) function = hook;
    RegisterCommHook(name, function, {.first = BindCommHook(std::move(state), std::move(hook))});
  }

  // The same for a hook of several rounds, such as PowerSGD: each round gets the result of the
  // round before. The first backward also compares the number of rounds. `name` defaults to
  // "custom".
  void register_comm_hook(CommHookRounds hook, const std::string& name = "") {
    RegisterCommHook(name, nullptr, std::move(hook));
  }

  // Synchronizes buffers with `hook(state, buffers by name)` instead of a broadcast. The hook runs
  // before or after every synchronized forward, in train() and in eval(). The backward waits for
  // the futures that the hook returns. The hook does not run when the options switch the
  // synchronization of buffers in forwards off. Throws ConfigurationError when called twice.
  template <typename State, typename Hook>
  void register_buffer_comm_hook(
      State state, Hook hook,
      BufferCommHookLocation location = BufferCommHookLocation::kPreForward) {
    RegisterBufferCommHook(BindBufferCommHook(std::move(state), std::move(hook)), location);
  }

  // Throws ReductionError, naming the parameters without a gradient, when a reduction has begun and
  // is not complete. The peers then fail as well. The next forward makes the same check; call this
  // to find the error earlier.
  void check_finished();

  // Completes the last synchronized backward, see the option require_manual_backward_finalization:
  // waits for the sums, and makes the averages the gradients. Collective: all ranks call it at the
  // same place among their collectives, once for each synchronized backward, after backward() has
  // returned. While should_finalize_after_backward() is false, a hook of the backward may call it
  // too, once all gradients have come. Throws ReductionError when there is nothing to finalize.
  void finalize_backward();
  bool should_finalize_after_backward() const;

  // Changes that option, on all ranks. Throws ReductionError between the first gradient of a
  // backward and the end of its reduction.
  void set_require_manual_backward_finalization(bool required);
  bool require_manual_backward_finalization() const;

  // Makes the next synchronized backward record the order of gradients and assign new buckets at
  // its end. Use it after the graph has changed. Call it on all ranks before the same backward.
  void rebuild_buckets();

  // Continues over the ranks of `group`; parameters, gradients and options stay. Collective over
  // all ranks of `group`. A rank that is new there gets the state from elsewhere first, and
  // constructs its model with init_sync=false. A hook whose state is the old group gets the new
  // group as its state. Throws as the constructor does. Throws ConfigurationError when a hook has
  // any other state or a Join is active, and ReductionError when a reduction is not complete.
  void update_process_group(std::shared_ptr<ProcessGroup> group);

  // Returns the parameter names of each bucket, in the order of reduction. A checkpoint saves them
  // for DistributedDataParallelOptions::bucket_layout. The model rebuilds its buckets once, at the
  // end of the first synchronized backward. With find_unused_parameters or a given layout it does
  // so only after rebuild_buckets().
  std::vector<std::vector<std::string>> bucket_layout() const;

  // Uses these buckets from the next backward on, like the option bucket_layout. Use it when the
  // model is wrapped before its checkpoint is read. Collective, with equal layouts on all ranks.
  // Throws ConfigurationError when the layout is empty, does not fit the model or differs between
  // the ranks, or when a Join is active. Throws ReductionError when a reduction is not complete.
  void set_bucket_layout(std::vector<std::vector<std::string>> layout);

  // Returns the group over whose ranks the model averages.
  std::shared_ptr<ProcessGroup> process_group() const;

  // Returns the module, without its type. Throws ConfigurationError when the wrapper holds a
  // torch::jit::Module.
  torch::nn::Module& base_module() const;

  // Returns properties and timings of the model. logging_data().to_json() is one line for a log.
  DDPLoggingData logging_data() const;

  // Samples timings in the first 10 iterations and then in every `iterations`-th one; the default
  // is 100. Throws ConfigurationError below 1.
  void set_logging_sample_rate(int64_t iterations);

  // Returns a table of the model's buckets for a person to read.
  std::string describe() const;

  // Returns the object that a ddp::Join uses for this model; pass `&model` to the Join. The pointer
  // stays valid when the wrapper moves.
  Joinable* joinable() const;

  // Returns false for a wrapper made of nullptr, and for one that the program has moved from.
  explicit operator bool() const { return synchronizer_ != nullptr; }

 protected:
  DataParallelHandle() = default;
  DataParallelHandle(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ProcessGroup> group,
                     const DistributedDataParallelOptions& options);
  DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                     const DistributedDataParallelOptions& options);
  DataParallelHandle(std::shared_ptr<const ModelView> model, std::shared_ptr<ProcessGroup> group,
                     const DistributedDataParallelOptions& options);
  DataParallelHandle(std::shared_ptr<const ModelView> model,
                     const DistributedDataParallelOptions& options);

  void CheckNotEmpty() const;

  // Steps of the synchronizer around the module's own forward.
  void BeforeForward();
  void AfterForward(const std::vector<at::Tensor>& outputs, bool complete);
  void OnForwardException();
  bool PlacesInputs() const;
  at::Tensor PlaceInput(const at::Tensor& input) const;
  bool PlacesOutputs() const;
  at::Tensor PlaceOutput(const at::Tensor& output) const;

 private:
  ModelSynchronizer& Core() const;
  void RegisterCommHook(const std::string& name, CommHookFunction function, CommHookRounds hook);
  void RegisterBufferCommHook(BufferCommHook hook, BufferCommHookLocation location);

  std::shared_ptr<ModelSynchronizer> synchronizer_;
  std::shared_ptr<torch::nn::Module> base_module_;  // null: the module has another type
};

// Adds `tensor` to `seen`. Returns false when it was there. Undefined tensors are all new.
inline bool IsNew(std::unordered_set<const at::TensorImpl*>& seen, const at::Tensor& tensor) {
  return !tensor.defined() || seen.insert(tensor.unsafeGetTensorImpl()).second;
}

// Return the parameters of a module without repeats, as PyTorch's Module.parameters() does. In
// LibTorch, a tensor with several names (a tied weight) is in the list once for each name, and an
// optimizer of that list steps it once for each. The first name stays.
inline std::vector<at::Tensor> UniqueParameters(const std::vector<at::Tensor>& all) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<at::Tensor> unique;
  for (const at::Tensor& tensor : all) {
    if (IsNew(seen, tensor)) unique.push_back(tensor);
  }
  return unique;
}

// `Parameters` is LibTorch's ordered dictionary from names to tensors.
template <typename Parameters>
Parameters UniqueNamedParameters(const Parameters& all) {
  std::unordered_set<const at::TensorImpl*> seen;
  Parameters unique;
  for (const auto& item : all) {
    if (IsNew(seen, item.value())) unique.insert(item.key(), item.value());
  }
  return unique;
}

}  // namespace internal

// Trains one module on all ranks of a process group as if on one rank. Every rank runs forward and
// backward on its own share of the batch. When backward() returns, every rank has the average of
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
// The wrapper replaces the module:
// - model->forward(x), model.forward(x) and model(x) all run the synchronized forward. `->` returns
//   the wrapper itself, so `.` and `->` mean the same.
// - parameters(), train(), to() and the other functions of torch::nn::Module below act on the
//   module. Names have no prefix: the bare module can load a state that the wrapper saved, and the
//   reverse. torch::save(model, path) and torch::load(model, path) work.
// - model.module() is the module itself. Its own forward is not synchronized: gradients of its
//   outputs stay on this rank.
//
// A wrapper is a handle, like LibTorch's module holders and tensors. Copies share one model, whose
// synchronization ends with the last copy: a backward of a synchronized forward after that end
// throws ReductionError. A wrapper may be a member, a return value and an element of a container. A
// member that gets its model later starts as `{nullptr}`.
// DistributedDataParallel<Net> (the holder) and DistributedDataParallel<NetImpl> convert to each
// other.
//
// Rules, as in PyTorch:
// - The constructor, forward and backward are collectives: call them on every rank in the same
//   order. A forward under torch::NoGradGuard is not a collective and may run on one rank alone.
// - The constructor checks that all ranks have the same model (names, order, shapes, types,
//   options). It then copies rank 0's parameters and buffers to all ranks.
// - Gradients are averaged, not summed. When ranks have different numbers of samples, scale each
//   rank's loss by its share.
// - Do not add parameters after construction, and do not unfreeze a parameter that was frozen then:
//   forward throws ConfigurationError. It finds an added parameter in a sampled iteration, see
//   set_logging_sample_rate(). A parameter that is frozen later gets no gradient, so the next rule
//   holds for it.
// - Every trainable parameter must get a gradient in every synchronized backward, unless
//   find_unused_parameters or static_graph is set. Otherwise an error names the missing parameters,
//   at the next forward at the latest.
// - A backward may go through the outputs of one or more forwards. Outputs of one forward are
//   reduced once: in one backward, or in several that share no parameter. A further backward
//   through them throws; it never sums locally in silence. Under no_sync() it accumulates.
// - torch::autograd::grad() does not average. After a backward with create_graph, the averaged
//   gradients are detached from the graph.
//
// Errors:
// - ConfigurationError: a model, options or hooks that differ between the ranks or are not usable;
//   mostly from the constructor.
// - ReductionError: forward or backward was misused, see the rules; or check_parameters_every has
//   found parameters that differ between the ranks.
// - CommunicationError, PeerFailedError: any call; a collective or a peer failed.
//
// A failure on one rank is thrown once on every rank: by the collective that waits for that rank,
// or by the next forward. The forward after that reconnects the ranks and starts again. Gradients
// keep their values, so call zero_grad(). When a rank is gone for good, every forward throws
// PeerFailedError. Under ddprun, let that exception end the process; the job continues in a new
// generation.
//
// Thread-compatible; copies of one wrapper count as one object.
template <typename Module>
class DistributedDataParallel : public internal::DataParallelHandle {
 public:
  // Makes an empty wrapper, for a member that gets its model later.
  DistributedDataParallel(std::nullptr_t) {}

  // Wraps `module` over the ranks of `group`. Collective: blocks until all ranks construct the
  // model. Throws as above.
  DistributedDataParallel(std::shared_ptr<Module> module, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : DataParallelHandle(module, std::move(group), options), module_(std::move(module)) {}

  // The same, with the group or the mesh in the options.
  DistributedDataParallel(std::shared_ptr<Module> module,
                          const DistributedDataParallelOptions& options)
      : DataParallelHandle(module, options), module_(std::move(module)) {}

  // The same for a holder that TORCH_MODULE made.
  template <internal::ModuleHolder Holder>
  DistributedDataParallel(const Holder& holder, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}
  template <internal::ModuleHolder Holder>
  DistributedDataParallel(const Holder& holder, const DistributedDataParallelOptions& options)
      : DistributedDataParallel(holder.ptr(), options) {}

  // Runs the module's own forward. Takes and returns any type: nothing, a tensor, a container or
  // plain struct of tensors, or anything that ddp/tensor_traversal.h can look into. With gradients
  // enabled and outside of no_sync(), the backward of the outputs averages. A module that throws
  // also fails the peers.
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

  // Returns the module; null for an empty wrapper.
  const std::shared_ptr<Module>& module() const { return module_; }

  // ---- Functions of torch::nn::Module, applied to the module.

  // A parameter with several names is there once, under the first, as in PyTorch: an optimizer over
  // the module's own list would step it once for each name.
  std::vector<at::Tensor> parameters(bool recurse = true) const {
    return internal::UniqueParameters(Bare().parameters(recurse));
  }
  auto named_parameters(bool recurse = true) const {
    return internal::UniqueNamedParameters(Bare().named_parameters(recurse));
  }
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
  // Changes this rank only: load the same archive on every rank.
  void load(torch::serialize::InputArchive& archive) { Bare().load(archive); }

  // Operators for torch::save and torch::load.
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

  // Returns a copy of `input` whose tensors have the device and type that the module expects. An
  // input that cannot be copied, or holds no tensor, is passed on unchanged.
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

// The wrapper of a TorchScript module: ddp/torch_script.h.
template <>
class DistributedDataParallel<torch::jit::Module>;

// The same wrapper, named by the module's holder.
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
