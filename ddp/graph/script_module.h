#ifndef DDP_GRAPH_SCRIPT_MODULE_H_
#define DDP_GRAPH_SCRIPT_MODULE_H_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/graph/captured_graph.h"
#include "ddp/graph/cut_program.h"
#include "ddp/graph/graph_module.h"
#include "ddp/graph/graph_options.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace ddp {

// A TorchScript module whose forward runs as a graph. It is a torch::nn::Module with the names and
// tensors of the script. Both share their tensors, and train() and eval() switch both. After each
// forward, also one that throws, a registered buffer has the value that the code has assigned.
// Autograd's saved values of such a buffer do not change: a backward gets the values of its own
// forward, whatever later forwards, broadcasts and loads write.
//
// One graph serves all shapes. A new graph is made when a number, flag or string in an attribute
// has changed, such as `training`; with more than max_graphs such combinations the script itself
// runs. A forward with gradients disabled runs the script itself. Thread-compatible.
class ScriptGraphModule final : public internal::GraphModuleBase {
 public:
  ScriptGraphModule(const torch::jit::Module& script, const GraphOptions& options);
  ~ScriptGraphModule() override;

  // Runs the forward over its arguments by position. Missing arguments take their defaults. Throws
  // ConfigurationError for arguments that do not fit the declaration, and when a module around this
  // one is being captured. Throws what the script throws: an operation that fails throws a
  // std::runtime_error or c10::Error with its message.
  c10::IValue forward(std::vector<c10::IValue> inputs);
  template <typename... Inputs>
  requires(std::constructible_from<c10::IValue, const Inputs&>&&...) c10::IValue
      forward(const Inputs&... inputs) {
    return forward(std::vector<c10::IValue>{c10::IValue(inputs)...});
  }

  // Returns a handle to the script, for save() for example.
  torch::jit::Module script() const;

  bool is_training() const noexcept override;
  void train(bool on = true) override;
  size_t graphs() const override { return programs_.size(); }

 private:
  // A registered tensor, and the attribute of the script with the same tensor.
  struct Followed {
    at::Tensor registered;
    internal::ScriptObject owner;
    size_t slot = 0;
    bool assigned = false;  // the code may assign it
    at::Tensor lent;        // the copy that the attribute has during a forward
    int64_t version = 0;    // of `lent` before the forward
  };
  class Mirror;

  const internal::CutProgram* FirstProgram() const override;
  const internal::CutProgram* Program();
  void FindAssigned(const internal::CapturedGraph& captured);
  void Lend();
  void Follow();

  const std::unique_ptr<torch::jit::Module> script_;
  std::vector<Followed> followed_;
  std::vector<std::unique_ptr<internal::CutProgram>> programs_;
};

// Returns the script as a graph in pieces. Throws ConfigurationError for options that are not
// usable, for a module without a forward or without parameters, and for one with hooks, sparse
// embeddings, SyncBatchNorm layers or autocast blocks, or whose code assigns a parameter.
std::shared_ptr<ScriptGraphModule> optimize_graph(const torch::jit::Module& script,
                                                  const GraphOptions& options = {});

}  // namespace ddp

#endif  // DDP_GRAPH_SCRIPT_MODULE_H_
