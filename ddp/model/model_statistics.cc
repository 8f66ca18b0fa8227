#include "ddp/model/model_statistics.h"

#include <algorithm>
#include <utility>

#include <ATen/core/Tensor.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/model/model_tensors.h"
#include "ddp/model/model_view.h"
#include "ddp/statistics/statistics_layers.h"
#include "ddp/transfer/coalesced_broadcast.h"

namespace ddp::internal {

ModelStatistics::ModelStatistics(std::shared_ptr<const ModelView> model,
                                 std::set<std::string> ignored)
    : model_(std::move(model)), ignored_(std::move(ignored)) {
  context_->has_layers = !model_->statistics_layers().empty();
}

// A graph may keep the context longer than the Join exists.
ModelStatistics::~ModelStatistics() { context_->announce = nullptr; }

bool ModelStatistics::InTraining() const {
  if (!has_layers()) return false;
  const std::vector<StatisticsLayer> layers = model_->statistics_layers();
  return std::any_of(layers.begin(), layers.end(),
                     [](const StatisticsLayer& layer) { return layer.training; });
}

ModelStatistics::Groups ModelStatistics::OwnGroups(const ModelGroup& of_model) const {
  Groups groups;
  for (const StatisticsLayer& layer : model_->statistics_layers()) {
    const std::shared_ptr<ModelGroup>& own = layer.group;
    if (own == nullptr || own->SameAs(of_model)) continue;
    if (own->size() > of_model.size()) {
      throw ConfigurationError(absl::StrCat(
          "rank ", of_model.rank(), ": a SyncBatchNorm has a process group of ", own->size(),
          " ranks, and the DistributedDataParallel one of ", of_model.size(),
          ": give the layer the model's group or a group of some of its ranks"));
    }
    const auto same = [&](const auto& other) { return other->SameAs(*own); };
    if (std::none_of(groups.begin(), groups.end(), same)) groups.push_back(own);
  }
  return groups;
}

void ModelStatistics::UseGroup(std::shared_ptr<ModelGroup> of_model, Groups own) {
  context_->group = std::move(of_model);
  context_->own_groups = std::move(own);
}

void ModelStatistics::CheckJoin() const {
  if (!own_groups().empty()) ThrowOwnGroupUnderJoin();
}

void ModelStatistics::BeginForward() {
  scopes_.push_back(std::make_unique<StatisticsScope>(context_));
}

void ModelStatistics::EndForward() { scopes_.pop_back(); }

void ModelStatistics::Broadcast(int source) {
  const ModelTensors tensors = ModelTensors::Of(*model_, ignored_);
  BroadcastBuffers(tensors, *context_->group, source);
  for (const auto& own : context_->own_groups) {
    own->ensure_usable();
    BroadcastBuffers(tensors, *own, 0);
  }
  may_differ_ = false;
}

// Broadcasts the buffers of the layers that take their statistics over `group`.
void ModelStatistics::BroadcastBuffers(const ModelTensors& tensors, ModelGroup& group,
                                       int source) const {
  std::set<const c10::TensorImpl*> of_layers;
  for (const StatisticsLayer& layer : model_->statistics_layers()) {
    const ModelGroup& used = layer.group ? *layer.group : *context_->group;
    if (!used.SameAs(group)) continue;
    for (const at::Tensor& buffer : layer.buffers) of_layers.insert(buffer.unsafeGetTensorImpl());
  }
  std::vector<NamedTensor> buffers;
  for (const NamedTensor& item : tensors.buffers) {
    if (of_layers.contains(item.tensor.unsafeGetTensorImpl())) buffers.push_back(item);
  }
  internal::Broadcast(
      group.communicator(), buffers,
      {.rank = group.rank(), .root = source, .what = "the broadcast of running statistics"});
}

}  // namespace ddp::internal
