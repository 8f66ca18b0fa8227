#ifndef DDP_ELASTIC_CHECKPOINT_OPTIMIZER_STATE_H_
#define DDP_ELASTIC_CHECKPOINT_OPTIMIZER_STATE_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/manifest.h"
#include "elastic/checkpoint/tensor_view.h"
#include "elastic/checkpoint/torch_tensors.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp::elastic {

// SGD, Adam and AdamW as a record and tensors, and back. Tensors are called as Python's state
// dictionary calls them, by parameter: "state.<parameter>.exp_avg"; "state.<parameter>.step" is one
// F32 number, as there, and the record has it exactly.
struct OptimizerState {
  OptimizerRecord record;
  std::vector<NamedTensor> tensors;
};

// Errors: kInvalidArgument (another kind of optimizer; a parameter that is not the model's).
absl::StatusOr<OptimizerState> StateOf(const torch::optim::Optimizer& optimizer,
                                       const ModelTensors& model);

// What of `manifest`'s optimizer does not fit `optimizer`, one line each.
std::vector<std::string> OptimizerMismatches(const torch::optim::Optimizer& optimizer,
                                             const ModelTensors& model, const Manifest& manifest);

// Builds the state of a manifest without mismatches beside the optimizer, and returns what puts it
// in place: that allocates nothing and cannot fail. Options, learning rate included, become the
// checkpoint's. `optimizer` must live until then.
std::function<void()> PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                       const ModelTensors& model, const OptimizerRecord& record,
                                       const std::map<std::string, TensorView>& values);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_OPTIMIZER_STATE_H_
