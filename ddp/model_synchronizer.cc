// Length: the parts of an iteration in their order, which a Join and a failure follow.

#include "ddp/model_synchronizer.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/environment.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/debug_level.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/join/model_event.h"
#include "ddp/logging_data_sources.h"
#include "ddp/model/model_metadata.h"
#include "ddp/model/model_tensors.h"
#include "ddp/model/model_view.h"
#include "ddp/model_agreement.h"
#include "ddp/model_report.h"
#include "ddp/model_setup.h"
#include "ddp/option_table.h"
#include "ddp/process_group.h"
#include "ddp/process_reducer_group.h"
#include "ddp/reducer/pass/pass_core.h"
#include "ddp/statistics/statistics_layers.h"
#include "ddp/transfer/coalesced_broadcast.h"
#include "ddp/transfer/copy_to_device.h"

namespace ddp::internal {
namespace {

constexpr char kMixedPrecisionHook[] = "mixed precision";

// The numbers of timed iterations after which the program's usage logger is called; as in PyTorch.
constexpr int64_t kUsageSamples[] = {10, 20, 50, 100, 500, 800, 1000};

}  // namespace

ModelSynchronizer::ModelSynchronizer(std::shared_ptr<const ModelView> model,
                                     DistributedDataParallelOptions options)
    : model_(std::move(model)),
      options_(std::move(options)),
      group_(GroupOf(options_)),
      buffers_(model_, options_.params_and_buffers_to_ignore) {
  if (!model_ || !group_) {
    throw ConfigurationError("DistributedDataParallel needs a module and a process group");
  }
  // Errors that this rank finds alone come first, so that all ranks with the same mistake report
  // it. They are not sent to the peers, which may still be in an earlier step. A program that ends
  // because of one informs its peers when its process group ends.
  CheckOptions(options_);
  const ModelTensors tensors = Tensors();
  CheckPlacement(options_, tensors, *group_);
  std::vector<Reducer::Parameter> reduced = ReducedParameters(options_, tensors);
  statistics_->has_layers = !model_->statistics_layers().empty();
  TakeGroup(group_, OwnGroups(group_));
  Reducer::Options reducer_options = ReducerOptionsOf(options_, reduced);
  reducer_options.collectives_in_backward = statistics_->has_layers;
  group_->ensure_usable();
  SetUp(tensors, std::move(reduced), reducer_options);
}

void ModelSynchronizer::SetUp(const ModelTensors& tensors, std::vector<Reducer::Parameter> reduced,
                              const Reducer::Options& reducer_options) {
  AgreeOnMetadata(tensors, *group_);
  if (options_.init_sync) BroadcastState(tensors, 0);
  reducer_ = std::make_unique<Reducer>(std::move(reduced), ReducedOver(), reducer_options);
  reducer_->set_on_first_pass([this] { AgreeOnHooks(); });
  reducer_->set_on_complete([this] { OnReductionComplete(); });
  reducer_->set_on_bare_backward([this](const std::string& name) { WarnOfBareBackward(name); });
  if (options_.mixed_precision.has_value()) SetUpMixedPrecision(tensors);
  if (!options_.delay_all_reduce_named_params.empty()) {
    delayed_ = std::make_unique<DelayedAllReduce>(options_.delay_all_reduce_named_params,
                                                  options_.param_to_hook_all_reduce, ReducedOver(),
                                                  DelayedStart());
  }
  first_bucket_sizes_ = BucketSizes(*reducer_);
  if (CurrentDebugLevel() != DebugLevel::kOff) LOG(INFO) << Describe() << LoggingData().to_json();
  incarnation_ = group_->incarnation();
  group_->communicator().BeginBarrier(group_->device(), "the end of a model's construction");
}

ModelSynchronizer::~ModelSynchronizer() { statistics_->announce = nullptr; }

void ModelSynchronizer::BroadcastState(const ModelTensors& tensors, int source) const {
  std::vector<at::Tensor> state;
  std::vector<std::string> names;
  const auto take = [&](const std::vector<NamedTensor>& items) {
    for (const NamedTensor& item : items) {
      state.push_back(item.tensor);
      names.push_back(item.name);
    }
  };
  take(tensors.parameters);
  if (options_.broadcast_buffers) take(tensors.buffers);
  BroadcastCoalesced(
      group_->communicator(), state, names,
      {.rank = group_->rank(), .root = source, .what = "the broadcast of the model"});
}

void ModelSynchronizer::SetUpMixedPrecision(const ModelTensors& tensors) {
  const MixedPrecision& config = *options_.mixed_precision;
  if (config.buffer_dtype.has_value()) {
    std::vector<at::Tensor> buffers;
    for (const NamedTensor& item : tensors.buffers) buffers.push_back(item.tensor);
    CastBuffers(buffers, *config.buffer_dtype);
  }
  if (config.reduction_dtype().has_value()) {
    reducer_->RegisterHook(kMixedPrecisionHook, {.first = [this](GradBucket& bucket) {
                             return reduce_dtype_hook(
                                 group_, *options_.mixed_precision->reduction_dtype())(bucket);
                           }});
  }
  if (!config.param_dtype.has_value()) return;
  std::vector<at::Tensor> parameters;
  for (const NamedTensor& item : tensors.parameters) parameters.push_back(item.tensor);
  mixed_precision_ = std::make_unique<MixedPrecisionParameters>(parameters, *config.param_dtype);
  reducer_->set_backward_callbacks({.begin = [this] { mixed_precision_->BeginBackward(); },
                                    .end = [this] { mixed_precision_->EndBackward(); }});
}

// ---- Forward.

void ModelSynchronizer::BeforeForward() {
  scopes_.push_back(std::make_unique<StatisticsScope>(statistics_));
  if (at::GradMode::is_enabled()) {
    BeginIteration();
  } else {
    TellListeners(/*collective=*/false);
    if (LayersRun()) {
      group_->ensure_usable();
      FollowIncarnation();
      group_->communicator().EndBarrier();
    }
  }
  if (mixed_precision_) mixed_precision_->BeginForward();
  reducer_->BeginForward();
}

void ModelSynchronizer::BeginIteration() {
  group_->ensure_usable();
  FollowIncarnation();
  reducer_->CheckFinished();
  TellListeners(/*collective=*/synchronize_);
  if (reducer_->ParametersChanged()) FollowParameters();
  if (!synchronize_) {
    if (SyncsBuffers()) buffers_.NoteForward();
    if (statistics_->has_layers) group_->communicator().EndBarrier();
    return;
  }
  if (!agreed_) {
    AgreeOnMetadata(Tensors(), *group_);
    agreed_ = true;
  }
  ++iteration_;
  timer_.StartIteration(iteration_, timer_.IsSampled(iteration_) ? MonotonicNanoseconds() : 0);
  // A failure of this iteration must not reach a rank that is still in a constructor.
  group_->communicator().EndBarrier();
  SyncForward();
}

void ModelSynchronizer::TellListeners(bool collective) const {
  for (const Listener& listener : on_forward_) {
    if (const auto owner = listener.owner.lock()) listener.run(collective);
  }
}

void ModelSynchronizer::FollowIncarnation() {
  if (group_->incarnation() != incarnation_) StartAfresh();
}

void ModelSynchronizer::StartAfresh() {
  incarnation_ = group_->incarnation();
  layers_unequal_ = statistics_->has_layers;
  buffers_.Abandon();
  reducer_->ResetAfterFailure(ReducedOver());
  if (delayed_) delayed_->Reset(ReducedOver());
}

// Follows a parameter that the module's to() has given a new type or device. Such a parameter has a
// new gradient accumulator without the reducer's hook.
void ModelSynchronizer::FollowParameters() {
  if (join_ != nullptr) {
    throw ConfigurationError(absl::StrCat(
        "rank ", group_->rank(),
        ": a parameter has changed its type, device or shape under a Join: finish the Join first"));
  }
  CheckPlacement(options_, Tensors(), *group_);
  reducer_->FollowParameters(GivenPlan(options_.bucket_layout, reducer_->parameters()));
  if (delayed_) delayed_->Reset(ReducedOver());
  agreed_ = false;
}

bool ModelSynchronizer::SyncsBuffers() const {
  return options_.forward_sync_buffers.value_or(options_.broadcast_buffers);
}

void ModelSynchronizer::SyncForward() {
  // A Join makes them equal at its end.
  if (layers_unequal_ && join_ == nullptr) BroadcastLayerBuffers(0);
  const bool sync = SyncsBuffers();
  const bool before = sync && buffers_.Due(BufferCommHookLocation::kPreForward);
  const bool after = sync && buffers_.Due(BufferCommHookLocation::kPostForward);
  int source = 0;
  if (join_ != nullptr && (before || after || join_options_.throw_on_early_termination)) {
    const ModelEvent event{
        .kind = ModelEvent::Kind::kForward, .buffers_before = before, .buffers_after = after};
    const JoinRound round = join_->notify(*this, event.Encode());
    source = round.source();
  }
  if (before) buffers_.Run(*group_, BufferCommHookLocation::kPreForward, source);
}

void ModelSynchronizer::AfterForward(const std::vector<at::Tensor>& outputs, bool complete) {
  RunAfterForward(outputs, complete);
  scopes_.pop_back();  // after an exception, OnForwardException() does it
}

void ModelSynchronizer::RunAfterForward(const std::vector<at::Tensor>& outputs, bool complete) {
  if (mixed_precision_) mixed_precision_->EndForward(at::GradMode::is_enabled());
  if (!at::GradMode::is_enabled()) return;
  if (synchronize_) {
    if (SyncsBuffers()) buffers_.Run(*group_, BufferCommHookLocation::kPostForward, 0);
    if (timer_.active()) timer_.StartBackward(MonotonicNanoseconds());
    if (reducer_->finds_unused() && outputs.empty()) ThrowNoOutputs(complete);
  }
  if (delayed_) delayed_->EndForward(synchronize_);
  const bool collectives = statistics_->has_layers && (synchronize_ || LayersRun());
  reducer_->EndForward(outputs, complete, synchronize_, collectives);
}

void ModelSynchronizer::ThrowNoOutputs(bool complete) {
  const std::string message = absl::StrCat(
      "rank ", group_->rank(),
      ": find_unused_parameters has to see the tensors that the forward returns, and ",
      complete ? "it returned none"
               : "found none in what it returned: return tensors, containers or plain structs of "
                 "them, or write a for_each_tensor_in for its type (ddp/tensor_traversal.h)");
  group_->report_failure(message);
  throw ConfigurationError(message);
}

void ModelSynchronizer::OnForwardException() {
  scopes_.pop_back();
  if (mixed_precision_) mixed_precision_->EndForward(/*backward_may_follow=*/false);
  if ((!at::GradMode::is_enabled() || !synchronize_) && !LayersRun()) return;
  std::string text = "an exception that is no std::exception";
  try {
    throw;
  } catch (const CommunicationError& error) {
    // The error may be that of one group among several.
    if (!statistics_->own_groups.empty()) ReportToAll(error.what_without_backtrace());
    return;  // all ranks know, or find the error themselves; the same for the next one
  } catch (const ReductionError&) {
    return;
  } catch (const std::exception& error) {
    text = MessageOf(error);
  } catch (...) {
  }
  ReportToAll(absl::StrCat("rank ", group_->rank(), ": the forward threw: ", text));
}

void ModelSynchronizer::ReportToAll(const std::string& reason) {
  ReducedOver()->report_failure(reason);
}

void ModelSynchronizer::OnReductionComplete() {
  in_join_event_ = false;
  buffers_.Finish(*group_);
  if (delayed_ && !reducer_->parameters().empty()) delayed_->Complete(reducer_->divisor());
  if (!timer_.active()) return;
  const Reducer::PassTimes& times = reducer_->times();
  timer_.StartCommunication(times.first_launch_ns);
  timer_.EndCompute(times.last_gradient_ns);
  timer_.EndCommunication(times.complete_ns);
  if (std::binary_search(std::begin(kUsageSamples), std::end(kUsageSamples), timer_.samples())) {
    ReportUsage(LoggingData());
  }
  if (CurrentDebugLevel() == DebugLevel::kDetail) LOG(INFO) << LoggingData().to_json();
}

void ModelSynchronizer::WarnOfBareBackward(const std::string& parameter) {
  if (warned_of_bare_backward_ || !synchronize_ || !model_->is_training()) return;
  warned_of_bare_backward_ = true;
  LOG(WARNING) << "rank " << group_->rank() << ": a backward reached parameter " << parameter
               << " through the bare module: it passed no forward of the DistributedDataParallel. "
                  "Its gradients stay on this rank and are not averaged. Call the wrapper's "
                  "forward, model.forward(...), to average them; where they are meant to be local, "
                  "run the backward under no_sync()";
}

bool ModelSynchronizer::places_inputs() const {
  return !options_.device_ids.empty() ||
         (mixed_precision_ && options_.mixed_precision->cast_forward_inputs);
}

at::Tensor ModelSynchronizer::PlaceInput(const at::Tensor& input) const {
  at::Tensor placed = input;
  if (!options_.device_ids.empty()) {
    placed = CopyToDevice(
        input, at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options_.device_ids[0])));
  }
  if (mixed_precision_ && options_.mixed_precision->cast_forward_inputs) {
    placed = CastInput(placed, *options_.mixed_precision->param_dtype);
  }
  return placed;
}

at::Tensor ModelSynchronizer::PlaceOutput(const at::Tensor& output) const {
  return output.to(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(*options_.output_device)));
}

// ---- Functions for users.

void ModelSynchronizer::RegisterCommHook(std::string name, CommHookRounds hook) {
  reducer_->RegisterHook(std::move(name), std::move(hook));
}

void ModelSynchronizer::RegisterBufferCommHook(BufferCommHook hook,
                                               BufferCommHookLocation location) {
  buffers_.RegisterHook(std::move(hook), location);
}

void ModelSynchronizer::UpdateProcessGroup(std::shared_ptr<ProcessGroup> group) {
  if (!group) throw ConfigurationError("update_process_group needs a process group");
  if (join_ != nullptr) {
    throw ConfigurationError("update_process_group cannot be called under a Join: finish it first");
  }
  reducer_->CheckFinished();
  for (const Listener& listener : on_forward_) {
    if (!listener.owner.expired()) {
      throw ConfigurationError(
          "a ZeroRedundancyOptimizer over the model would stay on the old group: end it before "
          "update_process_group, and make a new one after it");
    }
  }
  CheckHooksFollow(group_);
  StatisticsGroups own_groups = OwnGroups(group);
  const ModelTensors tensors = Tensors();
  tensors.CheckDevices(group->device(), group->backend());
  AgreeOnMetadata(tensors, *group);
  if (auto* hook = reducer_->hook().target<GroupCommHook>()) hook->group = group;
  if (auto* hook = buffers_.hook().target<GroupBufferCommHook>()) hook->group = group;
  if (group_->incarnation() != incarnation_) layers_unequal_ = statistics_->has_layers;
  TakeGroup(std::move(group), std::move(own_groups));
  incarnation_ = group_->incarnation();
  buffers_.Abandon();
  reducer_->Reset(ReducedOver());
  if (delayed_) delayed_->Reset(ReducedOver());
  group_->communicator().BeginBarrier(group_->device(), "the end of update_process_group");
}

// Refuses a hook that would continue over the old group: it would average over wrong ranks, or
// hang.
void ModelSynchronizer::CheckHooksFollow(const std::shared_ptr<ProcessGroup>& group) {
  const auto refuse = [](const std::string& what) {
    throw ConfigurationError(absl::StrCat(
        what,
        " has a state other than the model's process group, so update_process_group cannot give it "
        "the new group: construct a new DistributedDataParallel over the new group with "
        "init_sync=false, and register the hook there"));
  };
  if (reducer_->hook() && reducer_->hook_name() != kMixedPrecisionHook) {
    const auto* hook = reducer_->hook().target<GroupCommHook>();
    if (hook == nullptr || hook->group != group) {
      refuse(absl::StrCat("the comm hook \"", reducer_->hook_name(), "\""));
    }
  }
  if (buffers_.hook()) {
    const auto* hook = buffers_.hook().target<GroupBufferCommHook>();
    if (hook == nullptr || hook->group != group) refuse("the buffer comm hook");
  }
}

void ModelSynchronizer::SetBucketLayout(std::vector<std::vector<std::string>> layout) {
  if (layout.empty()) throw ConfigurationError("set_bucket_layout needs at least one bucket");
  if (join_ != nullptr) {
    throw ConfigurationError("set_bucket_layout cannot be called under a Join: finish it first");
  }
  reducer_->CheckFinished();
  const ModelTensors tensors = Tensors();
  BucketPlan plan = *GivenPlan(layout, ReducedParameters(options_, tensors));
  // Options count once all ranks have agreed on them: a refused layout leaves the old one.
  DistributedDataParallelOptions options = options_;
  options.bucket_layout = std::move(layout);
  AgreeOnModel(*group_, MetadataOf(options, tensors));
  options_ = std::move(options);
  reducer_->UsePlan(std::move(plan));
  first_bucket_sizes_ = BucketSizes(*reducer_);
}

// ---- Agreement.

ModelTensors ModelSynchronizer::Tensors() const {
  return ModelTensors::Of(*model_, options_.params_and_buffers_to_ignore);
}

std::shared_ptr<ReducerGroup> ModelSynchronizer::ReducedOver() const {
  return std::make_shared<ProcessReducerGroup>(group_, statistics_->own_groups);
}

void ModelSynchronizer::AgreeOnMetadata(const ModelTensors& tensors, ProcessGroup& group) const {
  AgreeOnModel(group, MetadataOf(options_, tensors));
}

// Runs in the first pass, because registering a hook is not a collective.
void ModelSynchronizer::AgreeOnHooks() const {
  if (group_->size() == 1) return;
  const ModelMetadata metadata =
      HookMetadataOf(reducer_->hook_name(), reducer_->hook_rounds(), buffers_.HookText());
  AgreeOnModel(*group_, metadata, "comm hooks (register the same on all of them)");
}

// ---- Layers with batch statistics over all ranks.

// Returns the groups of layers that have one other than `group`, each once.
ModelSynchronizer::StatisticsGroups ModelSynchronizer::OwnGroups(
    const std::shared_ptr<ProcessGroup>& group) const {
  const ProcessReducerGroup of_model(group);
  StatisticsGroups groups;
  for (const StatisticsLayer& layer : model_->statistics_layers()) {
    const std::shared_ptr<StatisticsGroup>& own = layer.group;
    if (own == nullptr || own->SameAs(of_model)) continue;
    if (own->size() > group->size()) {
      throw ConfigurationError(absl::StrCat(
          "rank ", group->rank(), ": a SyncBatchNorm has a process group of ", own->size(),
          " ranks, and the DistributedDataParallel one of ", group->size(),
          ": give the layer the model's group or a group of some of its ranks"));
    }
    const auto same = [&](const auto& other) { return other->SameAs(*own); };
    if (std::none_of(groups.begin(), groups.end(), same)) groups.push_back(own);
  }
  return groups;
}

void ModelSynchronizer::TakeGroup(std::shared_ptr<ProcessGroup> group,
                                  StatisticsGroups own_groups) {
  group_ = std::move(group);
  statistics_->group = std::make_shared<ProcessReducerGroup>(group_);
  statistics_->own_groups = std::move(own_groups);
}

bool ModelSynchronizer::LayersRun() const {
  if (!statistics_->has_layers) return false;
  const std::vector<StatisticsLayer> layers = model_->statistics_layers();
  return std::any_of(layers.begin(), layers.end(),
                     [](const StatisticsLayer& layer) { return layer.training; });
}

// The running statistics are equal on all ranks without a broadcast, with two exceptions:
// - on ranks that joined before the last forward
// - after a failure, which may come when some ranks have counted a batch and others have not
void ModelSynchronizer::BroadcastLayerBuffers(int source) {
  const ModelTensors tensors = Tensors();
  BroadcastLayerBuffers(tensors, *statistics_->group, source);
  for (const auto& own : statistics_->own_groups) {
    own->ensure_usable();
    BroadcastLayerBuffers(tensors, *own, 0);
  }
  layers_unequal_ = false;
}

// Broadcasts the buffers of the layers that take their statistics over `group`.
void ModelSynchronizer::BroadcastLayerBuffers(const ModelTensors& tensors, StatisticsGroup& group,
                                              int source) const {
  std::set<const c10::TensorImpl*> of_layers;
  for (const StatisticsLayer& layer : model_->statistics_layers()) {
    const StatisticsGroup& used = layer.group ? *layer.group : *statistics_->group;
    if (!used.SameAs(group)) continue;
    for (const at::Tensor& buffer : layer.buffers) of_layers.insert(buffer.unsafeGetTensorImpl());
  }
  std::vector<at::Tensor> buffers;
  std::vector<std::string> names;
  for (const NamedTensor& item : tensors.buffers) {
    if (of_layers.count(item.tensor.unsafeGetTensorImpl()) == 0) continue;
    buffers.push_back(item.tensor);
    names.push_back(item.name);
  }
  BroadcastCoalesced(
      group.communicator(), buffers, names,
      {.rank = group.rank(), .root = source, .what = "the broadcast of running statistics"});
}

// ---- Join.

// The hook of a Join: repeats the collectives of the other ranks on a rank without inputs.
class ModelSynchronizer::Shadow : public JoinHook {
 public:
  explicit Shadow(ModelSynchronizer* synchronizer) : synchronizer_(synchronizer) {}

  void on_join() override {
    synchronizer_->FollowIncarnation();
    synchronizer_->CheckFinished();
  }
  void main_hook(const JoinRound& round) override { synchronizer_->ShadowRound(round); }
  void post_hook(bool is_last_joiner, int last_joiner) override {
    synchronizer_->FinishJoin(last_joiner);
  }

 private:
  ModelSynchronizer* const synchronizer_;
};

std::unique_ptr<JoinHook> ModelSynchronizer::join_hook(const JoinOptions& options) {
  if (reducer_->hook_name() == kMixedPrecisionHook && !options.divide_by_initial_world_size) {
    throw ConfigurationError(
        "mixed_precision reduces by a hook, which divides by the world size: a Join over it needs "
        "divide_by_initial_world_size");
  }
  if (!statistics_->own_groups.empty()) {
    throw ConfigurationError(
        "a SyncBatchNorm has a process group of its own, which joined ranks do not know: under a "
        "Join, leave its group unset, or give it the model's");
  }
  join_options_ = options;
  return std::make_unique<Shadow>(this);
}

void ModelSynchronizer::enter_join(Join* join) {
  join_ = join;
  was_joined_ = true;
  in_join_event_ = false;
  const auto divisor = [this](const JoinRound& round) {
    return join_options_.divide_by_initial_world_size ? group_->size() : round.num_active();
  };
  reducer_->set_announce([this, divisor](PassParts parts) {
    const JoinRound round = join_->notify(*this, ModelEvent{.parts = parts}.Encode());
    in_join_event_ = true;
    return Reducer::PassStart{.divisor = divisor(round), .source = round.source()};
  });
  statistics_->announce = [this] {
    return join_->notify(*this, ModelEvent{.kind = ModelEvent::Kind::kStatistics}.Encode())
        .source();
  };
  if (!delayed_) return;
  delayed_->set_start(reducer_->parameters().empty() ? DelayedAllReduce::When::kAtTriggerAlone
                                                     : DelayedAllReduce::When::kAfterBuckets);
  delayed_->set_announce([this, divisor] {
    return divisor(join_->notify(*this, ModelEvent{.kind = ModelEvent::Kind::kDelayed}.Encode()));
  });
}

// With the same graph on every rank, the trigger has the same place among the buckets.
DelayedAllReduce::When ModelSynchronizer::DelayedStart() const {
  if (reducer_->parameters().empty()) return DelayedAllReduce::When::kAtTriggerAlone;
  return options_.find_unused_parameters || options_.static_graph
             ? DelayedAllReduce::When::kAfterBuckets
             : DelayedAllReduce::When::kAtTrigger;
}

std::string ModelSynchronizer::join_name() const { return model_->name(); }

std::string ModelSynchronizer::join_event_name(int event) const {
  return ModelEvent::Decode(event).ToString();
}

void ModelSynchronizer::leave_join() {
  join_ = nullptr;
  reducer_->set_announce({});
  statistics_->announce = nullptr;
  if (!delayed_) return;
  delayed_->set_announce({});
  delayed_->set_start(DelayedStart());
}

void ModelSynchronizer::ShadowRound(const JoinRound& round) {
  const int source = round.source();
  const ModelEvent event = ModelEvent::Decode(round.event);
  switch (event.kind) {
    case ModelEvent::Kind::kDelayed:
      return delayed_->Shadow();
    case ModelEvent::Kind::kStatistics:
      return ShadowSum(*statistics_->group, source);
    case ModelEvent::Kind::kPass:
      reducer_->Shadow(event.parts, source);
      if (delayed_) delayed_->Shadow();
      return buffers_.Finish(*group_);
    case ModelEvent::Kind::kForward:
      if (event.buffers_before) buffers_.Run(*group_, BufferCommHookLocation::kPreForward, source);
      if (event.buffers_after) buffers_.Run(*group_, BufferCommHookLocation::kPostForward, source);
  }
}

void ModelSynchronizer::FinishJoin(int last_joiner) {
  buffers_.Finish(*group_);
  BroadcastState(Tensors(), last_joiner);
  if (statistics_->has_layers && !options_.broadcast_buffers) BroadcastLayerBuffers(last_joiner);
  layers_unequal_ = false;
  if (!options_.static_graph) return;
  // A rank that never had inputs has not counted the graph. Then all ranks count again.
  const at::Tensor counted =
      at::tensor({reducer_->must_count() ? 0 : 1}, at::kInt).to(group_->device());
  Communicator::Pending pending =
      group_->communicator().AllReduceMin(counted, {"the end of a join"});
  group_->communicator().Wait(pending);
  if (counted.item<int>() == 0) reducer_->ForgetCounts();
}

// ---- Reports.

DDPLoggingData ModelSynchronizer::LoggingData() const {
  DDPLoggingData data;
  data.module_name = model_->name();
  data.backend_name = group_->backend();
  data.world_size = group_->size();
  data.rank = group_->rank();
  FillOptions(options_, data);
  data.join_uneven_inputs = was_joined_;
  data.has_sync_bn = statistics_->has_layers;
  data.iteration = iteration_;
  DescribeParameters(*reducer_, data);
  data.bucket_sizes = first_bucket_sizes_;
  data.error = reducer_->error();
  FillEnvironment(data, &EnvironmentVariable);
  FillTimes(data, timer_);
  return data;
}

void ModelSynchronizer::SetLoggingSampleRate(int64_t iterations) {
  const absl::Status status = timer_.SetSampleRate(iterations);
  if (!status.ok()) throw ConfigurationError(std::string(status.message()));
}

std::string ModelSynchronizer::Describe() const {
  return absl::StrCat(model_->name(), " on rank ", group_->rank(), " of ", group_->size(), " (",
                      group_->backend(), "), ", BucketTable(*reducer_));
}

}  // namespace ddp::internal
