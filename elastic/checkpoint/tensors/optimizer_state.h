#ifndef DDP_ELASTIC_CHECKPOINT_TENSORS_OPTIMIZER_STATE_H_
#define DDP_ELASTIC_CHECKPOINT_TENSORS_OPTIMIZER_STATE_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "elastic/checkpoint/tensors/torch_tensors.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp::elastic {

// The state of an SGD, Adam or AdamW: a record (kind, options, step counts) and tensors. A tensor's
// name has the parameter's name in the model and Python's name of the state:
// "state.<parameter>.exp_avg". The tensors share the optimizer's memory. Adam and AdamW also have
// "state.<parameter>.step", one F32 number as in Python; the record holds the exact integer.
struct OptimizerState {
  OptimizerRecord record;
  std::vector<NamedTensor> tensors;
  std::vector<size_t> parameters;  // by tensor: its parameter's number in the order of the groups
};

// Returns the state of `optimizer`. Errors: kInvalidArgument for another kind of optimizer, or a
// parameter that is not the model's.
absl::StatusOr<OptimizerState> StateOf(const torch::optim::Optimizer& optimizer,
                                       const ModelTensors& model);

// Returns the differences between `manifest`'s optimizer and `optimizer`, one line each.
std::vector<std::string> OptimizerMismatches(const torch::optim::Optimizer& optimizer,
                                             const ModelTensors& model, const Manifest& manifest);

// Returns "lr of group 0: 0.0001 in the program, 0.05 in the checkpoint" for each option that
// differs between two records of the same kind and groups.
std::vector<std::string> DifferentOptions(const OptimizerRecord& program,
                                          const OptimizerRecord& checkpoint);

// Builds the optimizer's new state from a manifest without mismatches, and returns the function
// that installs it. The function sets all options, learning rate included, and cannot fail: the
// states and the room for them are allocated before. `optimizer` must outlive the function. The
// state is on the parameters' devices, or in host memory.
std::function<void()> PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                       const ModelTensors& model, const OptimizerRecord& record,
                                       const std::map<std::string, TensorView>& values,
                                       bool in_host_memory = false);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_TENSORS_OPTIMIZER_STATE_H_
