#ifndef DDP_GRAPH_GRAPH_MODULE_H_
#define DDP_GRAPH_GRAPH_MODULE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include "ddp/graph/captured_graph.h"
#include "ddp/graph/cut_program.h"
#include "ddp/graph/graph_options.h"
#include "ddp/graph/trace_capture.h"

namespace ddp::internal {

// Throws ConfigurationError when a module in `module` computes statistics over all ranks, because a
// collective cannot be part of a graph. A script's module is known by "SyncBatchNorm" in its name.
void RefuseStatisticsLayers(const torch::nn::Module& module);

// The part of an optimized module that does not depend on how its graph was captured.
// Thread-compatible.
class GraphModuleBase : public torch::nn::Module {
 public:
  // Returns the parameter names of each bucket for DistributedDataParallelOptions::bucket_layout or
  // set_bucket_layout(): the buckets are the pieces, the last piece first. A piece whose parameters
  // differ in type or device, or are sparse, has several buckets. Parameters that the graph does
  // not read are in the last bucket of their type. A parameter without requires_grad is in no
  // bucket: call this function again when requires_grad has changed. Throws ConfigurationError
  // while no graph is captured: give optimize_graph() example inputs, or run one forward.
  std::vector<std::vector<std::string>> bucket_layout() const;

  // Return the pieces of the first captured graph, as a table for a person and as one line of JSON.
  // Throw as bucket_layout() does.
  std::string describe() const;
  std::string describe_as_json() const;

  // Returns the number of captured graphs.
  virtual size_t graphs() const = 0;

 protected:
  GraphModuleBase(const std::string& name, const GraphOptions& options);

  // Lists the parameters. Call it when all of them are registered. `sparse`: the parameters whose
  // gradients will be sparse.
  void ListParameters(const std::set<const c10::TensorImpl*>& sparse);
  virtual const CutProgram* FirstProgram() const = 0;
  // Returns true when one more graph may be captured. At max_graphs it returns false, and logs a
  // warning the first time. `combination`: "shapes", for example: each of them has a graph.
  bool MayAddGraph(const char* combination);
  const GraphOptions& options() const { return options_; }
  const std::vector<ModelParameter>& model_parameters() const { return model_parameters_; }

 private:
  const CutProgram& RequireProgram() const;

  const GraphOptions options_;
  std::vector<ModelParameter> model_parameters_;
  bool warned_ = false;
};

// Appends `value` to `key`: the metadata of a tensor (not its values), and the values of numbers,
// strings and other plain values, in lists, tuples and dicts too. Throws ConfigurationError for a
// value of another kind.
void AppendToKey(const c10::IValue& value, std::vector<int64_t>& key);

// The non-template part of GraphModule: its graphs are traces of a module written in C++.
class TracedModuleBase : public GraphModuleBase {
 public:
  size_t graphs() const override { return programs_.size(); }

  // Do what the same functions of the original module do.
  void train(bool on = true) override { original_->train(on); }
  bool is_training() const noexcept override { return original_->is_training(); }
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  void zero_grad(bool set_to_none = true) override { original_->zero_grad(set_to_none); }
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void pretty_print(std::ostream& stream) const override;

 protected:
  // One call of forward.
  struct Call {
    std::vector<at::Tensor> tensors;  // of the arguments; an undefined one has no part in a graph
    std::vector<int64_t> key;
  };
  struct Program {
    std::vector<int64_t> key;
    std::unique_ptr<CutProgram> program;
    std::vector<bool> defined;     // for each tensor of the result
    std::shared_ptr<void> result;  // of the forward's type, with undefined tensors
  };
  // Runs the module's own forward over `tensors` in place of its arguments' tensors. Returns the
  // result's tensors and puts a result without tensors into `empty`.
  using TypedForward = std::function<std::vector<at::Tensor>(std::vector<at::Tensor> tensors,
                                                             std::shared_ptr<void>& empty)>;

  TracedModuleBase(std::shared_ptr<torch::nn::Module> original, const GraphOptions& options);

  // Returns true when this forward runs through a graph: gradients are enabled, and no module
  // around this one is being captured.
  static bool RunsGraph();
  // Returns the program for the call, and captures it first when there is none. Null: there are
  // max_graphs other programs.
  const Program* ProgramFor(Call call, const TypedForward& forward);
  // Returns the tensors of the result, undefined ones included.
  static std::vector<at::Tensor> Run(const Program& program, std::vector<at::Tensor> tensors);

 private:
  const CutProgram* FirstProgram() const override;
  void AppendState(std::vector<int64_t>& key) const;
  void RefuseNewStatisticsLayers();

  const std::shared_ptr<torch::nn::Module> original_;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<NamedState> state_;  // parameters, then buffers, each tensor once
  std::vector<at::Tensor> buffers_of_state_;
  std::vector<std::unique_ptr<Program>> programs_;
  int64_t marks_seen_ = 0;  // ModuleMarks::changes() at the last check of the layers
};

}  // namespace ddp::internal

#endif  // DDP_GRAPH_GRAPH_MODULE_H_
