// DistributedDataParallel for a TorchScript module: a model that torch::jit::load() reads from a
// file, without its Python source.
#ifndef DDP_TORCH_SCRIPT_H_
#define DDP_TORCH_SCRIPT_H_

#include <concepts>
#include <cstddef>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include "ddp/distributed_data_parallel.h"
#include "ddp/options.h"

namespace ddp {

// Trains one TorchScript module on all ranks of a process group as if on one rank.
//
//   #include <torch/script.h>
//
//   auto group = ddp::init_process_group();
//   ddp::DistributedDataParallel model(torch::jit::load("model.pt"), group);
//   torch::optim::SGD optimizer(model->parameters(), 0.1);
//   for (...) {
//     optimizer.zero_grad();
//     loss(model(inputs).toTensor(), targets).backward();  // gradients are averaged in here
//     optimizer.step();
//   }
//   if (group->rank() == 0) model->save("trained.pt");
//
// The rules, options and errors are those of DistributedDataParallel over a torch::nn::Module.
// no_sync(), hooks, Join, sync_buffers() and bucket_layout() work alike. The differences:
// - The module takes and returns c10::IValue. The wrapper finds output tensors in tuples, lists
//   and dicts, nested to any depth.
// - Methods other than forward are not synchronized: model.module().run_method("encode", x).
// - The constructor also throws ConfigurationError for a module without the method forward, and for
//   a frozen module, which has no parameters.
// - A gradient is sparse when the code of forward calls an embedding with sparse=True.
// - base_module() throws ConfigurationError. So ddp::elastic's Training and Checkpointer, which
//   need a torch::nn::Module, refuse the wrapper.
//
// The wrapper is a handle, and so is torch::jit::Module: copies share one model. Thread-compatible.
template <>
class DistributedDataParallel<torch::jit::Module> : public internal::DataParallelHandle {
 public:
  using Kwargs = std::unordered_map<std::string, c10::IValue>;

  // Makes an empty wrapper, for a member that gets its model later.
  DistributedDataParallel(std::nullptr_t) {}

  // Wraps `module` over the ranks of `group`. Collective: blocks until all ranks construct the
  // model. Every rank loads the module itself, and gets rank 0's values here.
  DistributedDataParallel(const torch::jit::Module& module, std::shared_ptr<ProcessGroup> group,
                          const DistributedDataParallelOptions& options = {});

  // The same, with the group or the mesh in the options.
  DistributedDataParallel(const torch::jit::Module& module,
                          const DistributedDataParallelOptions& options);

  // Runs the module's own forward, with the module's hooks. `inputs` and `kwargs` are the arguments
  // of forward, by position and by name. Returns the module's result. Under device_ids or
  // mixed_precision, the module gets copies of lists and dicts that hold tensors; the caller's own
  // stay as they are. A module that throws also fails the peers.
  c10::IValue forward(std::vector<c10::IValue> inputs, const Kwargs& kwargs = {});

  // The same with each argument by itself: model(x, 3) is model.forward({x, 3}).
  template <typename... Inputs>
  requires(std::constructible_from<c10::IValue, const Inputs&>&&...) c10::IValue operator()(
      const Inputs&... inputs) {
    return forward({c10::IValue(inputs)...});
  }

  DistributedDataParallel* operator->() { return this; }
  const DistributedDataParallel* operator->() const { return this; }

  // Returns a handle to the module. Throws ConfigurationError for an empty wrapper, as all
  // functions below do.
  torch::jit::Module module() const;

  // Returns the parameters for an optimizer. A parameter that the module has under several names is
  // in the list once: LibTorch's optimizers would step a repeated parameter twice.
  std::vector<at::Tensor> parameters(bool recurse = true) const;
  // The same with the first name of each.
  std::vector<torch::jit::NameTensor> named_parameters(bool recurse = true) const;

  // Drops the gradients; with set_to_none=false, sets them to zero.
  void zero_grad(bool set_to_none = true);

  // ---- Functions of torch::jit::Module, applied to the module.

  auto buffers(bool recurse = true) const { return module().buffers(recurse); }
  auto named_buffers(bool recurse = true) const { return module().named_buffers(recurse); }
  auto modules() const { return module().modules(); }
  auto named_modules() const { return module().named_modules(); }
  auto children() const { return module().children(); }
  auto named_children() const { return module().named_children(); }
  bool is_training() const { return module().is_training(); }

  void train(bool on = true) { module().train(on); }
  void eval() { module().eval(); }
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) {
    module().to(device, dtype, non_blocking);
  }
  void to(at::ScalarType dtype, bool non_blocking = false) { module().to(dtype, non_blocking); }
  void to(at::Device device, bool non_blocking = false) { module().to(device, non_blocking); }
  void apply(const std::function<void(torch::jit::Module&)>& function) { module().apply(function); }
  // Write a file that torch::jit::load() and Python's torch.jit.load() read.
  void save(const std::string& path) const { module().save(path); }
  void save(std::ostream& stream) const { module().save(stream); }

 private:
  c10::IValue Run(std::vector<c10::IValue> inputs, const Kwargs& kwargs);

  torch::jit::Module module_;
};

DistributedDataParallel(const torch::jit::Module&, const DistributedDataParallelOptions&)
    ->DistributedDataParallel<torch::jit::Module>;

DistributedDataParallel(const torch::jit::Module&, std::shared_ptr<ProcessGroup>,
                        const DistributedDataParallelOptions& = {})
    ->DistributedDataParallel<torch::jit::Module>;

}  // namespace ddp

#endif  // DDP_TORCH_SCRIPT_H_
