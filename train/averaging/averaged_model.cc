#include "train/averaging/averaged_model.h"

#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/utils.h>

#include "ddp/common/error.h"
#include "ddp/nn/sync_batch_norm.h"
#include "ddp/process_group.h"

namespace ddp::train {

namespace {

constexpr char kKind[] = "AveragedModel";

bool IsAveraged(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

// A tensor of the average, and that of the model.
struct Pair {
  at::Tensor average;
  at::Tensor current;
  bool is_buffer;
};

// Adds the tensors of `ours` beside those of the same names in `theirs`.
template <typename Tensors>
void AddPairs(const Tensors& ours, const Tensors& theirs, bool buffers, std::vector<Pair>& pairs) {
  const std::string kind = buffers ? "buffer" : "parameter";
  for (const auto& entry : ours) {
    const at::Tensor* found = theirs.find(entry.key());
    if (found == nullptr || found->sizes() != entry.value().sizes()) {
      throw ConfigurationError("AveragedModel: the model has no " + kind + " \"" + entry.key() +
                               "\" of the average's shape; give it the model it was made of");
    }
    pairs.push_back({entry.value(), *found, buffers});
  }
  if (ours.size() == theirs.size()) return;
  throw ConfigurationError("AveragedModel: the model has " + std::to_string(theirs.size()) + " " +
                           kind + "s and the average " + std::to_string(ours.size()) +
                           "; give it the model it was made of");
}

std::string NameInState(const std::string& name) { return "module/" + name; }

// The statistics of one BatchNorm layer.
class Statistics {
 public:
  template <typename Layer>
  explicit Statistics(Layer& layer)
      : mean_(layer.running_mean),
        variance_(layer.running_var),
        batches_(layer.num_batches_tracked),
        momentum_(layer.options.momentum()),
        set_momentum_(
            [&layer](std::optional<double> momentum) { layer.options.momentum(momentum); }) {
    if (mean_.defined()) layer.reset_running_stats();
    set_momentum_(std::nullopt);  // the mean over all batches
  }

  void Restore() const { set_momentum_(momentum_); }

  // Replaces the statistics by those over the batches of all ranks.
  void TakeMean(ProcessGroup& group) {
    if (!mean_.defined()) return;
    const at::Tensor batches = batches_.to(at::kDouble).view({1});
    const at::Tensor sums =
        at::cat({mean_.to(at::kDouble) * batches, variance_.to(at::kDouble) * batches, batches});
    group.all_reduce(sums, ReduceOp::kSum);
    const int64_t channels = mean_.numel();
    const at::Tensor total = sums.narrow(0, 2 * channels, 1);
    batches_.copy_(total.view_as(batches_));
    if (total.item<double>() == 0) return;
    mean_.copy_(sums.narrow(0, 0, channels) / total);
    variance_.copy_(sums.narrow(0, channels, channels) / total);
  }

 private:
  at::Tensor mean_, variance_, batches_;
  std::optional<double> momentum_;
  std::function<void(std::optional<double>)> set_momentum_;
};

template <typename... Layers>
void AddStatistics(torch::nn::Module& module, std::vector<Statistics>& all) {
  const auto add = [&](auto* layer) {
    if (layer != nullptr) all.emplace_back(*layer);
  };
  (add(dynamic_cast<Layers*>(&module)), ...);
}

std::vector<Statistics> StatisticsOf(torch::nn::Module& model) {
  std::vector<Statistics> all;
  for (const auto& module : model.modules()) {
    AddStatistics<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
                  torch::nn::BatchNorm3dImpl, SyncBatchNorm1dImpl, SyncBatchNorm2dImpl,
                  SyncBatchNorm3dImpl>(*module, all);
  }
  return all;
}

}  // namespace

AveragedModelBase::AveragedModelBase(std::shared_ptr<torch::nn::Module> average,
                                     AveragedModelOptions options)
    : average_(std::move(average)), options_(std::move(options)) {
  const auto& decay = options_.ema_decay;
  if (decay.has_value() && !(*decay >= 0 && *decay <= 1)) {
    throw ConfigurationError("AveragedModel: ema_decay is " + std::to_string(*decay) +
                             ", it must be between 0 and 1");
  }
  if (decay.has_value() && options_.avg_fn) {
    throw ConfigurationError("AveragedModel: both ema_decay and avg_fn are set; set one of them");
  }
}

void AveragedModelBase::Average(const at::Tensor& average, const at::Tensor& current) const {
  if (options_.avg_fn) {
    average.copy_(options_.avg_fn(average, current, n_averaged_));
  } else if (options_.ema_decay.has_value()) {
    average.lerp_(current, 1 - *options_.ema_decay);
  } else {
    average.add_((current - average).div_(static_cast<double>(n_averaged_ + 1)));
  }
}

void AveragedModelBase::update_parameters(const torch::nn::Module& model) {
  std::vector<Pair> pairs;
  AddPairs(average_->named_parameters(), model.named_parameters(), /*buffers=*/false, pairs);
  AddPairs(average_->named_buffers(), model.named_buffers(), /*buffers=*/true, pairs);
  const at::NoGradGuard no_grad;
  for (const auto& [average, current, is_buffer] : pairs) {
    const bool copied =
        n_averaged_ == 0 || !IsAveraged(average) || (is_buffer && !options_.use_buffers);
    if (copied) {
      average.copy_(current);
    } else {
      Average(average, current.to(average.options()));
    }
  }
  ++n_averaged_;
}

SavedState AveragedModelBase::save_state() const {
  SavedState state;
  state.values["kind"] = std::string(kKind);
  state.values["n_averaged"] = n_averaged_;
  for (const auto& entry : average_->named_parameters()) {
    state.tensors[NameInState(entry.key())] = entry.value().detach();
  }
  for (const auto& entry : average_->named_buffers()) {
    state.tensors[NameInState(entry.key())] = entry.value().detach();
  }
  return state;
}

void AveragedModelBase::load_state(const SavedState& state) {
  const auto& kind = state.value<std::string>("kind");
  if (kind != kKind) {
    throw ConfigurationError("the saved state is of a " + kind + ", and not of an AveragedModel");
  }
  const auto n_averaged = state.value<int64_t>("n_averaged");
  const SavedState own = save_state();
  for (const auto& [name, tensor] : own.tensors) {
    if (state.tensor(name).sizes() == tensor.sizes()) continue;
    throw ConfigurationError("AveragedModel: the saved \"" + name + "\" has another shape");
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own.tensors) tensor.copy_(state.tensor(name));
  n_averaged_ = n_averaged;
}

void update_bn(torch::nn::Module& model, const std::function<bool()>& forward_next,
               const std::shared_ptr<ProcessGroup>& group) {
  std::vector<Statistics> layers = StatisticsOf(model);
  if (layers.empty()) return;
  const bool was_training = model.is_training();
  const auto restore = [&] {
    for (const Statistics& layer : layers) layer.Restore();
    model.train(was_training);
  };
  const at::NoGradGuard no_grad;
  model.train();
  try {
    while (forward_next()) {
    }
  } catch (...) {
    restore();
    throw;
  }
  restore();
  if (group == nullptr) return;
  for (Statistics& layer : layers) layer.TakeMean(*group);
}

}  // namespace ddp::train
