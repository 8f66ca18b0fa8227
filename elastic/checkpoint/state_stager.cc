#include "elastic/checkpoint/state_stager.h"

#include <cmath>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/headeronly/version.h>
#include <torch/nn/module.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "ddp/comm/last_passes.h"
#include "ddp/common/logging.h"
#include "elastic/checkpoint/random_generators.h"
#include "elastic/checkpoint/tensors/optimizer_state.h"
#include "elastic/data/elastic_sampler.h"

namespace ddp::elastic {
namespace {

// Of each tensor in a staging buffer: enough for every element type, and a line of the cache.
constexpr uint64_t kAlignment = 64;

uint64_t Aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A tensor that this rank writes, and its view in the contents.
struct Item {
  const NamedTensor* tensor;
  TensorView* view;
};

void AddWritten(const std::vector<bool>& written, const std::vector<NamedTensor>& tensors,
                std::vector<TensorView>& views, std::vector<Item>& items) {
  CHECK_EQ(views.size(), tensors.size());
  for (size_t i = 0; i < views.size(); ++i) {
    if (written[i]) items.push_back({&tensors[i], &views[i]});
  }
}

// Copies the values of `tensor` to `target`, row by row.
void CopyValues(const at::Tensor& tensor, const TensorView& view, char* target) {
  const at::Tensor source = tensor.detach();
  const bool is_plain =
      source.device().is_cpu() && source.is_contiguous() && !source.is_conj() && !source.is_neg();
  if (is_plain) {
    std::memcpy(target, source.const_data_ptr(), view.bytes);
    return;
  }
  TensorView here = view;
  here.data = target;
  TensorOver(here).copy_(source);
}

}  // namespace

// Describes the state. The views of `contents` have no values yet.
absl::StatusOr<CheckpointContents> StateStager::Plan(const PlainState& plain,
                                                     Tensors& tensors) const {
  const TrainingState& state = plain.state;
  ModelTensors model = TensorsOf(*state.model);
  CheckpointContents contents;
  Manifest& description = contents.description;
  description.id = {state.step, options_.generation};
  description.epoch = state.epoch;
  description.bucket_layout = state.bucket_layout;
  description.aliases = model.aliases;
  description.run_id = options_.run_id;
  description.generation_nonce = options_.generation_nonce;
  description.torch_version = TORCH_VERSION;
  description.saved_unix_seconds = absl::ToUnixSeconds(absl::Now());
  if (state.metric.has_value() && std::isfinite(*state.metric)) description.metric = state.metric;
  if (state.sampler != nullptr) description.sampler = state.sampler->state();
  if (state.optimizer != nullptr) {
    DDP_ASSIGN_OR_RETURN(OptimizerState optimizer, StateOf(*state.optimizer, model));
    description.optimizer = std::move(optimizer.record);
    tensors.optimizer = std::move(optimizer.tensors);
  }
  tensors.parameters = std::move(model.parameters);
  tensors.buffers = std::move(model.buffers);
  DDP_ASSIGN_OR_RETURN(contents.parameters, FormsOf(tensors.parameters));
  DDP_ASSIGN_OR_RETURN(contents.buffers, FormsOf(tensors.buffers));
  DDP_ASSIGN_OR_RETURN(contents.optimizer, FormsOf(tensors.optimizer));
  return contents;
}

// Collects the values of those tensors of a ShardedOptimizer that this rank writes. Collective over
// its ranks.
void StateStager::FillOptimizer(const PlainState& plain,
                                const absl::StatusOr<CheckpointContents>& contents,
                                Tensors& tensors) const {
  torch::optim::Optimizer& whole = *plain.whole;
  const ModelTensors model = TensorsOf(*plain.state.model);
  std::vector<bool> needed;  // by parameter
  for (const auto& group : whole.param_groups()) {
    needed.resize(needed.size() + group.params().size());
  }
  if (contents.ok()) {
    const absl::StatusOr<OptimizerState> forms = StateOf(whole, model);
    CHECK(forms.ok()) << forms.status();  // Plan() has done the same
    const std::vector<bool> written =
        WrittenTensors(*contents, options_.rank, options_.world_size).optimizer;
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i]) needed[forms->parameters[i]] = true;
    }
  }
  plain.sharded->FillState(whole, needed);
  if (!contents.ok()) return;
  absl::StatusOr<OptimizerState> optimizer = StateOf(whole, model);
  CHECK(optimizer.ok()) << optimizer.status();
  tensors.optimizer = std::move(optimizer->tensors);
}

// Gives values to the views of the tensors that this rank writes.
absl::Status StateStager::CopyShare(const Tensors& tensors, StagingBuffers* buffers,
                                    StagedState& staged) const {
  const at::NoGradGuard no_grad;
  CheckpointContents& contents = *staged.contents;
  // Already copies.
  DDP_ASSIGN_OR_RETURN(contents.extra, ViewsOf(RngStates(options_.rank), staged.keep));

  const WrittenShare written = WrittenTensors(contents, options_.rank, options_.world_size);
  std::vector<Item> items;
  AddWritten(written.parameters, tensors.parameters, contents.parameters, items);
  AddWritten(written.buffers, tensors.buffers, contents.buffers, items);
  AddWritten(written.optimizer, tensors.optimizer, contents.optimizer, items);
  if (buffers == nullptr) {
    for (const Item& item : items) {
      DDP_ASSIGN_OR_RETURN(std::vector<TensorView> view, ViewsOf({*item.tensor}, staged.keep));
      *item.view = std::move(view.front());
    }
    return absl::OkStatus();
  }
  uint64_t bytes = kAlignment;  // no empty buffer
  for (const Item& item : items) bytes += Aligned(item.view->bytes);
  DDP_ASSIGN_OR_RETURN(StagingBuffers::Lease lease, buffers->Take(bytes));
  staged.buffer.emplace(std::move(lease));
  char* target = staged.buffer->data();
  for (const Item& item : items) {
    item.view->data = target;
    if (item.view->bytes > 0) CopyValues(item.tensor->tensor, *item.view, target);
    target += Aligned(item.view->bytes);
  }
  return absl::OkStatus();
}

StagedState StateStager::Stage(const TrainingState& state, StagingBuffers* buffers,
                               const absl::Status& refused) const {
  const PlainState plain = PlainState::WithForms(state);
  StagedState staged{.contents = absl::InternalError("nothing planned"), .keep = {}, .buffer = {}};
  Tensors tensors;
  const auto guarded = [&staged](const auto& step) {
    try {
      absl::Status status = step();
      if (!status.ok()) staged.contents = std::move(status);
    } catch (const std::exception& error) {
      // A rank that threw, while the others wait for it, would leave them without a reason.
      const std::string text = error.what();
      staged.contents = absl::InvalidArgumentError(text.substr(0, text.find('\n')));
    }
  };
  guarded([&]() -> absl::Status {
    DDP_RETURN_IF_ERROR(refused);
    DDP_ASSIGN_OR_RETURN(staged.contents, Plan(plain, tensors));
    return absl::OkStatus();
  });
  if (plain.sharded != nullptr) FillOptimizer(plain, staged.contents, tensors);
  if (staged.contents.ok()) guarded([&] { return CopyShare(tensors, buffers, staged); });
  if (!ddp::internal::LastPassesAreProven()) {
    staged.contents = absl::AbortedError(
        absl::StrCat("rank ", options_.rank,
                     ": a failure has aborted a reduction of gradients after the backward had "
                     "returned, so the optimizer may have stepped on wrong gradients"));
  }
  return staged;
}

}  // namespace ddp::elastic
