#ifndef DDP_GRAPH_SCRIPT_MODULE_H_
#define DDP_GRAPH_SCRIPT_MODULE_H_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include "ddp/graph/cut_program.h"
#include "ddp/graph/graph_options.h"
#include "ddp/graph/script_capture.h"

namespace ddp {

// A TorchScript module whose forward runs as a graph; optimize_graph() makes it. It is a
// torch::nn::Module with the names and tensors of the script. Both share their tensors, and train()
// and eval() switch both. After each forward, also one that throws, a registered buffer has the
// value that the code has assigned. Autograd's saved values of such a buffer do not change: a
// backward gets the values of its own forward, whatever later forwards, broadcasts and loads write.
//
// One graph serves all shapes. A new graph is made when a number, flag or string in an attribute
// has changed, such as `training`; with more than max_graphs such combinations the script itself
// runs. A forward with gradients disabled runs the script itself. Thread-compatible.
class ScriptGraphModule final : public torch::nn::Module {
 public:
  ScriptGraphModule(const torch::jit::Module& script, const GraphOptions& options);
  ~ScriptGraphModule() override;

  // Runs the forward over its arguments by position. Missing arguments take their defaults. Throws
  // ConfigurationError for arguments that do not fit the declaration. Throws what the script
  // throws: an operation that fails throws a std::runtime_error or c10::Error with its message.
  c10::IValue forward(std::vector<c10::IValue> inputs);
  template <typename... Inputs>
  requires(std::constructible_from<c10::IValue, const Inputs&>&&...) c10::IValue
      forward(const Inputs&... inputs) {
    return forward(std::vector<c10::IValue>{c10::IValue(inputs)...});
  }

  // Returns the parameter names of each bucket for DistributedDataParallelOptions::bucket_layout or
  // set_bucket_layout(): the buckets are the pieces, the last piece first. A piece whose parameters
  // differ in type or device has several buckets. Parameters that the graph does not read are in
  // the last bucket of their type. A parameter without requires_grad is in no bucket: call this
  // function again when requires_grad has changed.
  std::vector<std::vector<std::string>> bucket_layout() const;

  // Return the pieces of the first graph, as a table for a person and as one line of JSON.
  std::string describe() const;
  std::string describe_as_json() const;

  // Returns the number of graphs, at least 1.
  size_t graphs() const { return programs_.size(); }

  // Returns a handle to the script, for save() for example.
  torch::jit::Module script() const;

  bool is_training() const noexcept override;
  void train(bool on = true) override;

 private:
  // A registered tensor, and the attribute of the script with the same tensor.
  struct Followed {
    at::Tensor registered;
    internal::ScriptAttribute attribute;
    bool assigned = false;  // the code may assign it
    at::Tensor lent;        // the copy that the attribute has during a forward
    int64_t version = 0;    // of `lent` before the forward
  };
  class Mirror;

  void ListParameters();
  void AddProgram();
  const internal::CutProgram* Program();
  void FindAssigned(const internal::CapturedGraph& captured);
  void Lend();
  void Follow();

  const GraphOptions options_;
  const std::unique_ptr<torch::jit::Module> script_;
  std::vector<Followed> followed_;
  std::vector<internal::ModelParameter> model_parameters_;
  std::vector<std::unique_ptr<internal::CutProgram>> programs_;  // one at least
  bool warned_ = false;                                          // of max_graphs
};

}  // namespace ddp

#endif  // DDP_GRAPH_SCRIPT_MODULE_H_
