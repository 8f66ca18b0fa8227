#include "ddp/model/nn_module_view.h"

#include <optional>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "ddp/statistics/module_marks.h"

namespace ddp::internal {
namespace {

template <typename Items>
std::vector<NamedTensor> Named(const Items& items) {
  std::vector<NamedTensor> named;
  for (const auto& item : items) named.push_back({.name = item.key(), .tensor = item.value()});
  return named;
}

std::vector<at::Tensor> BuffersOf(const torch::nn::Module& module) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    if (buffer.defined()) buffers.push_back(buffer);
  }
  return buffers;
}

// A tensor that two modules share has the mark of one of them, so the module is compared.
std::optional<MarkedModule> MarkOf(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = BuffersOf(module);
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
    if (parameter.defined()) tensors.push_back(parameter);
  }
  for (const at::Tensor& tensor : tensors) {
    std::optional<MarkedModule> mark = ModuleMarks::OfProcess().Find(tensor);
    if (mark.has_value() && mark->module.lock().get() == &module) return mark;
  }
  return std::nullopt;
}

void AddLayer(const torch::nn::Module& module, std::vector<StatisticsLayer>& layers) {
  std::shared_ptr<ModelGroup> group;
  if (const auto* own = dynamic_cast<const StatisticsModule*>(&module)) {
    group = own->statistics_group();
  } else if (const auto mark = MarkOf(module)) {
    if (mark->group) group = mark->group();
  } else {
    return;
  }
  layers.push_back(
      {.training = module.is_training(), .group = std::move(group), .buffers = BuffersOf(module)});
}

}  // namespace

std::vector<StatisticsLayer> FindStatisticsLayers(const torch::nn::Module& module) {
  std::vector<StatisticsLayer> layers;
  AddLayer(module, layers);
  for (const auto& submodule : module.modules(/*include_self=*/false)) {
    AddLayer(*submodule, layers);
  }
  return layers;
}

NnModuleView::NnModuleView(std::shared_ptr<torch::nn::Module> module)
    : module_(std::move(module)) {}

std::string NnModuleView::name() const { return module_->name(); }

std::vector<NamedTensor> NnModuleView::parameters() const {
  return Named(module_->named_parameters());
}

std::vector<NamedTensor> NnModuleView::buffers() const { return Named(module_->named_buffers()); }

std::set<const c10::TensorImpl*> NnModuleView::sparse_parameters() const {
  std::set<const c10::TensorImpl*> weights;
  for (const auto& submodule : module_->modules()) {
    if (const auto* embedding = submodule->as<torch::nn::EmbeddingImpl>();
        embedding != nullptr && embedding->options.sparse()) {
      weights.insert(embedding->weight.unsafeGetTensorImpl());
    }
    if (const auto* bag = submodule->as<torch::nn::EmbeddingBagImpl>();
        bag != nullptr && bag->options.sparse()) {
      weights.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  return weights;
}

std::vector<StatisticsLayer> NnModuleView::statistics_layers() const {
  return FindStatisticsLayers(*module_);
}

bool NnModuleView::is_training() const { return module_->is_training(); }

}  // namespace ddp::internal
