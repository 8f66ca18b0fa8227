// The state of optimizers as bytes and as typed objects. The functions find the values of a state
// by their names in the state's own serialization, so they work with every LibTorch optimizer.
#ifndef DDP_OPTIM_SHARD_STATE_H_
#define DDP_OPTIM_SHARD_STATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include "ddp/optim/shard_plan.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Makes an optimizer over parameter groups.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup> groups)>;

// The state of a part of one parameter. `state` may be null.
struct StatePart {
  int64_t parameter = 0;
  int64_t begin = 0;
  int64_t end = 0;
  const torch::optim::OptimizerParamState* state = nullptr;
};

// What the bytes of a state have of a tensor with more than one element: its values, or its type
// and size only, with the memory of one element.
enum class StateContent { kValues, kForms };

// Returns the parts as bytes. Parts without a state are left out.
std::string StateBytes(const std::vector<StatePart>& parts,
                       StateContent content = StateContent::kValues);

// Puts together the states of whole parameters from the bytes of all ranks, which have `content`,
// and gives them to `whole`, an optimizer over all parameters. Frees the bytes on the way: no more
// than about twice their size is in use at a time. A value with the shape of its part belongs to a
// tensor like the parameter; any other value (a step count) is taken as it is. The tensors are on
// the CPU, with values or without, as the bytes.
//
// A trial step tells the type of the states. `example`: a state of that type, for an optimizer
// whose current options make no state in the trial step; may be null.
//
// Throws ConfigurationError when a part of a tensor is missing, and when the type of the states
// cannot be found out.
void AssembleState(std::vector<std::string> bytes, const OptimizerFactory& make,
                   const torch::optim::OptimizerParamState* example, torch::optim::Optimizer& whole,
                   StateContent content = StateContent::kValues);

// The limits of FillStates().
struct FillLimits {
  int64_t batch_bytes = int64_t{64} << 20;  // of states that travel together, unless one is larger
};

// Gives `whole`, a result of AssembleState() without values, the values of those states that are
// `needed` on this rank. `needed`: by parameter. Sends the states in batches. Beside the states
// that it needs, a rank holds about four times one batch. Collective. Returns the most bytes of
// texts, which the states travel as, that this rank held at a time.
int64_t FillStates(ProcessGroup& group, const std::vector<StatePart>& mine,
                   const std::vector<bool>& needed, torch::optim::Optimizer& whole,
                   const FillLimits& limits = {});

// Returns the state of a piece of `parameter`, whose state is `whole`, on the device of the
// parameter. Its tensors of the parameter's shape are as PieceOf().
std::unique_ptr<torch::optim::OptimizerParamState> CutState(
    const torch::optim::OptimizerParamState& whole, const at::Tensor& parameter,
    const ShardPlan::Piece& piece);

// The options of all parameter groups as bytes, and back.
std::string OptionBytes(const std::vector<torch::optim::OptimizerParamGroup>& groups);
void SetOptions(const std::string& bytes, std::vector<torch::optim::OptimizerParamGroup>& groups);

// Replaces `text` by that of `root` on every rank, in rounds of at most 64 MiB. A rank that does
// not `keep` the text holds one round at a time and gets an empty one. Collective.
void BroadcastText(ProcessGroup& group, int root, std::string& text, bool keep = true);

// Returns every rank's text by rank, on rank `to`; on all ranks when `to` is -1. Elsewhere the
// texts are empty. Sends rounds of at most 64 MiB through the group's device. Collective.
std::vector<std::string> CollectTexts(ProcessGroup& group, const std::string& mine, int to);

}  // namespace ddp::internal

#endif  // DDP_OPTIM_SHARD_STATE_H_
