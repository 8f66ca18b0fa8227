#include "ddp/model/nn_module_view.h"

#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

namespace ddp::internal {
namespace {

template <typename Items>
std::vector<NamedTensor> Named(const Items& items) {
  std::vector<NamedTensor> named;
  for (const auto& item : items) named.push_back({.name = item.key(), .tensor = item.value()});
  return named;
}

}  // namespace

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

bool NnModuleView::is_training() const { return module_->is_training(); }

}  // namespace ddp::internal
