// How a ZeroCore collects the optimizer's state, and takes its part of a loaded one.
#include <utility>

#include <ATen/core/Tensor.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/model/model_metadata.h"
#include "ddp/optim/shard_plan.h"
#include "ddp/optim/zero_core.h"
#include "ddp/process_group.h"
#include "ddp/wrapper/model_agreement.h"

namespace ddp::internal {
namespace {

constexpr char kCollection[] = "the collection of a ZeroRedundancyOptimizer's state";

}  // namespace

std::unique_ptr<torch::optim::Optimizer> ZeroCore::MakePlain(const Groups& groups) const {
  return make_(groups);
}

// Finds out whether all ranks can collect the state. Collective.
void ZeroCore::BeginCollection(const Groups& groups) {
  FinishEarlier(kCollection);
  Start start;
  Guard(kCollection, [&] { start = Exchange(groups, /*stepping=*/false); });
  start.ThrowError();
}

std::vector<StatePart> ZeroCore::MyState() const {
  std::vector<StatePart> parts;
  for (const ShardedParameters::Mine& mine : parameters_.mine()) {
    const auto found = inner_->state().find(mine.view.unsafeGetTensorImpl());
    if (found == inner_->state().end()) continue;
    parts.push_back({.parameter = mine.piece.parameter,
                     .begin = mine.piece.begin,
                     .end = mine.piece.end,
                     .state = found->second.get()});
  }
  return parts;
}

std::unique_ptr<torch::optim::Optimizer> ZeroCore::CollectState(const Groups& groups, int to,
                                                                StateContent content) {
  std::unique_ptr<torch::optim::Optimizer> whole;
  Guard(kCollection, [&] {
    const std::vector<StatePart> parts = MyState();
    std::vector<std::string> texts = CollectTexts(*group_, StateBytes(parts, content), to);
    if (to >= 0 && to != group_->rank()) return;
    whole = MakePlain(groups);
    AssembleState(std::move(texts), make_, parts.empty() ? nullptr : parts.front().state, *whole,
                  content);
  });
  return whole;
}

std::unique_ptr<torch::optim::Optimizer> ZeroCore::DescribeState(const Groups& groups) {
  BeginCollection(groups);
  return CollectState(groups, /*to=*/-1, StateContent::kForms);
}

void ZeroCore::FillState(torch::optim::Optimizer& whole, const std::vector<bool>& needed) {
  Guard(kCollection, [&] { FillStates(*group_, MyState(), needed, whole); });
}

std::unique_ptr<torch::optim::Optimizer> ZeroCore::Collect(const Groups& groups, int to) {
  BeginCollection(groups);
  ModelMetadata metadata;
  metadata.AddOption("to", absl::StrCat(to));
  AgreeOnModel(*group_, metadata, "arguments of consolidate_state_dict()");
  if (to < -1 || to >= group_->size()) {
    throw ConfigurationError(absl::StrCat("consolidate_state_dict(", to,
                                          "): the group has ranks 0 ", "to ", group_->size() - 1,
                                          ", and -1 means all of them"));
  }
  return CollectState(groups, to, StateContent::kValues);
}

std::function<void()> ZeroCore::PrepareState(const torch::optim::Optimizer& whole, Groups& groups) {
  // Values of an earlier step must not arrive after those of the state.
  if (group_->failed() || group_->incarnation() != incarnation_) {
    transfer_.AbandonPeers();
    transfer_.Drop();
  } else {
    Wait();
  }
  using States = std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;
  const auto states = std::make_shared<States>();
  for (const ShardedParameters::Mine& mine : parameters_.mine()) {
    const at::Tensor& tensor = parameters_.tensors()[mine.piece.parameter];
    const auto found = whole.state().find(tensor.unsafeGetTensorImpl());
    if (found == whole.state().end()) continue;
    states->emplace_back(mine.view.unsafeGetTensorImpl(),
                         CutState(*found->second, tensor, mine.piece));
  }
  const auto options =
      std::make_shared<std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>>();
  for (const auto& group : whole.param_groups()) options->push_back(group.options().clone());
  // The table is reserved now, so that putting the states in place does not grow it.
  inner_->state().reserve(inner_->state().size() + states->size());
  return [this, states, options, &groups] {
    inner_->state().clear();
    for (auto& [view, state] : *states) inner_->state()[view] = std::move(state);
    for (size_t g = 0; g < groups.size(); ++g) groups[g].set_options(std::move((*options)[g]));
    values_ = Values::kWhole;
    transfer_.peers().Forget();
    ++version_;
  };
}

}  // namespace ddp::internal
