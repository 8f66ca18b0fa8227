#include "ddp/nn/convert_sync_batchnorm.h"

#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/model/nn_module_view.h"
#include "ddp/nn/joint_batch_norm.h"
#include "ddp/nn/sync_batch_norm.h"
#include "ddp/statistics/module_marks.h"
#include "ddp/statistics/statistics_context.h"

namespace ddp {
namespace {

using internal::BatchNormCall;
using internal::MarkedModule;
using internal::ModelGroup;
using OptionalTensor = std::optional<at::Tensor>;

// ---- The function for aten::batch_norm.

std::optional<MarkedModule> MarkOf(const BatchNormCall& call) {
  for (const at::Tensor* tensor : {&call.running_mean, &call.weight}) {
    if (!tensor->defined()) continue;
    if (auto mark = internal::ModuleMarks::OfProcess().Find(*tensor)) return mark;
  }
  return std::nullopt;
}

std::shared_ptr<ModelGroup> GroupOf(const MarkedModule& mark) {
  if (!mark.group) return nullptr;
  auto group = mark.group();
  if (group != nullptr) return group;
  throw ConfigurationError(
      "the process group that convert_sync_batchnorm() got for a BatchNorm has been destroyed: "
      "keep "
      "the group as long as the layer trains");
}

// BatchNorm's forward has counted this batch already.
void UncountRecomputedBatch(const torch::nn::Module& module) {
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const at::Tensor* const count = buffers.find("num_batches_tracked");
  const at::NoGradGuard no_grad;
  if (count != nullptr && count->defined()) count->sub_(1);
}

at::Tensor BatchNorm(const at::Tensor& input, const OptionalTensor& weight,
                     const OptionalTensor& bias, const OptionalTensor& running_mean,
                     const OptionalTensor& running_var, bool training, double momentum, double eps,
                     bool cudnn_enabled) {
  const BatchNormCall call{.input = input,
                           .weight = weight.value_or(at::Tensor()),
                           .bias = bias.value_or(at::Tensor()),
                           .running_mean = running_mean.value_or(at::Tensor()),
                           .running_var = running_var.value_or(at::Tensor()),
                           .momentum = momentum,
                           .eps = eps};
  const std::optional<MarkedModule> mark = training ? MarkOf(call) : std::nullopt;
  const auto module = mark.has_value() ? mark->module.lock() : nullptr;
  // A layer in eval() without running statistics normalizes by its own batch.
  if (module == nullptr || !module->is_training()) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training,
                                  momentum, eps, cudnn_enabled);
  }
  if (internal::StatisticsReplay::Current() != nullptr) UncountRecomputedBatch(*module);
  return internal::JointBatchNorm(call, GroupOf(*mark));
}

// The keys of autograd see a call first; the others see it in inference mode. A device without its
// keys here would take the statistics of its own batch, and no error would tell.
void RegisterOnce() {
  static auto* const libraries = new std::vector<torch::Library>();  // never destroyed
  static std::once_flag once;
  std::call_once(once, [] {
    using Key = c10::DispatchKey;
    for (const Key key : {Key::AutogradCPU, Key::AutogradCUDA, Key::AutogradXPU, Key::AutogradHPU,
                          Key::AutogradMTIA, Key::AutogradPrivateUse1, Key::CPU, Key::CUDA,
                          Key::XPU, Key::HPU, Key::MTIA, Key::PrivateUse1}) {
      libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      libraries->back().impl("batch_norm", &BatchNorm);
    }
  });
}

// ---- Conversion.

struct Found {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> tensors;  // its running mean and weight, where defined
};

template <typename Layer>
bool AddIf(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
           std::vector<Found>& found) {
  const auto* const layer = dynamic_cast<const Layer*>(module.get());
  if (layer == nullptr) return false;
  Found item{.name = name, .module = module, .tensors = {}};
  for (const at::Tensor& tensor : {layer->running_mean, layer->weight}) {
    if (tensor.defined()) item.tensors.push_back(tensor);
  }
  found.push_back(std::move(item));
  return true;
}

void AddBatchNorm(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
                  std::vector<Found>& found) {
  static_cast<void>(AddIf<torch::nn::BatchNorm1dImpl>(name, module, found) ||
                    AddIf<torch::nn::BatchNorm2dImpl>(name, module, found) ||
                    AddIf<torch::nn::BatchNorm3dImpl>(name, module, found));
}

bool IsBatchNorm(torch::nn::Module& module) {
  std::vector<Found> found;
  // Points to the module without owning it.
  AddBatchNorm("", std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &module), found);
  return !found.empty();
}

std::vector<Found> BatchNormsOf(torch::nn::Module& module) {
  std::vector<Found> found;
  if (const auto self = module.weak_from_this().lock()) {
    AddBatchNorm("the module itself", self, found);
  } else if (IsBatchNorm(module)) {
    throw ConfigurationError(
        "convert_sync_batchnorm got a BatchNorm that no shared pointer holds: make it by its "
        "holder, or by std::make_shared");
  }
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    AddBatchNorm(item.key(), item.value(), found);
  }
  return found;
}

}  // namespace

int convert_sync_batchnorm(torch::nn::Module& module, std::shared_ptr<ProcessGroup> group) {
  const std::vector<Found> found = BatchNormsOf(module);
  for (const Found& layer : found) {
    if (!layer.tensors.empty()) continue;
    throw ConfigurationError(absl::StrCat(
        "convert_sync_batchnorm cannot convert ", layer.name, " (", layer.module->name(),
        "): it has neither a weight nor running statistics by which it could be "
        "recognized; use a ddp::SyncBatchNorm there"));
  }
  if (found.empty()) return 0;
  RegisterOnce();
  MarkedModule mark;
  if (group != nullptr) {
    mark.group = [weak = std::weak_ptr<ProcessGroup>(group)] {
      return internal::ModelGroupOf(weak.lock());
    };
  }
  for (const Found& layer : found) {
    mark.module = layer.module;
    internal::ModuleMarks::OfProcess().Set(layer.tensors, mark);
  }
  return static_cast<int>(found.size());
}

bool has_sync_batch_norm(const torch::nn::Module& module) {
  return !internal::FindStatisticsLayers(module).empty();
}

}  // namespace ddp
