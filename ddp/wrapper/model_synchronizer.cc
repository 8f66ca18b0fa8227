// Length: all events of a forward and a backward meet here, on the same parts.

#include "ddp/wrapper/model_synchronizer.h"

#include <exception>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/environment.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/debug_level.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/model/model_metadata.h"
#include "ddp/model/model_statistics.h"
#include "ddp/model/model_tensors.h"
#include "ddp/model/model_view.h"
#include "ddp/model/wrapped_parameters.h"
#include "ddp/process_group.h"
#include "ddp/process_group/model_group.h"
#include "ddp/reducer/pass/pass_core.h"
#include "ddp/reducer/unused_parameters.h"
#include "ddp/transfer/coalesced_broadcast.h"
#include "ddp/wrapper/logging_data_sources.h"
#include "ddp/wrapper/model_agreement.h"
#include "ddp/wrapper/model_report.h"
#include "ddp/wrapper/model_setup.h"
#include "ddp/wrapper/option_table.h"

namespace ddp::internal {
namespace {

std::vector<at::Tensor> WithoutNames(const std::vector<NamedTensor>& items) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& item : items) tensors.push_back(item.tensor);
  return tensors;
}

}  // namespace

ModelSynchronizer::ModelSynchronizer(std::shared_ptr<const ModelView> model,
                                     DistributedDataParallelOptions options)
    : model_(std::move(model)),
      options_(std::move(options)),
      group_(GroupOf(options_)),
      buffers_(model_, options_.params_and_buffers_to_ignore),
      replica_check_(options_.check_parameters_every) {
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
  statistics_ = std::make_unique<ModelStatistics>(model_, options_.params_and_buffers_to_ignore);
  TakeGroup(group_, statistics_->OwnGroups(ModelGroup(group_)));
  Reducer::Options reducer_options = ReducerOptionsOf(options_, reduced);
  reducer_options.collectives_in_backward = statistics_->has_layers();
  group_->ensure_usable();
  SetUp(tensors, std::move(reduced), reducer_options);
}

void ModelSynchronizer::SetUp(const ModelTensors& tensors, std::vector<Reducer::Parameter> reduced,
                              const Reducer::Options& reducer_options) {
  AgreeOnModel(*group_, MetadataOf(options_, tensors));
  if (options_.init_sync) BroadcastState(tensors, 0);
  wrapped_ = std::make_unique<WrappedParameters>(tensors);
  reducer_ = std::make_unique<Reducer>(std::move(reduced), ReducedOver(), reducer_options);
  reducer_->set_on_first_pass([this] { AgreeOnHooks(); });
  reducer_->set_on_doubt(
      [this] { ReplicaCheck::Compare(Tensors().parameters, iteration_, group_->communicator()); });
  reducer_->set_on_complete([this] { OnReductionComplete(); });
  reducer_->set_on_bare_backward([this](const std::string& name) { WarnOfBareBackward(name); });
  reducer_->set_on_unused(
      [this](const std::vector<int>& unused) { return LookForStranger(unused); });
  SetManualFinalization(options_.require_manual_backward_finalization);
  if (options_.mixed_precision.has_value()) SetUpMixedPrecision(tensors);
  if (!options_.delay_all_reduce_named_params.empty()) {
    delayed_ = std::make_unique<DelayedAllReduce>(options_.delay_all_reduce_named_params,
                                                  options_.param_to_hook_all_reduce, ReducedOver(),
                                                  DelayedStart());
  }
  MakeJoin();
  first_bucket_sizes_ = BucketSizes(*reducer_);
  if (CurrentDebugLevel() != DebugLevel::kOff) LOG(INFO) << Describe() << LoggingData().to_json();
  incarnation_ = group_->incarnation();
  group_->communicator().BeginBarrier(group_->device(), "the end of a model's construction");
}

ModelSynchronizer::~ModelSynchronizer() = default;

DelayedAllReduce::When ModelSynchronizer::DelayedStart() const {
  return ModelJoin::DelayedStart(options_, !reducer_->parameters().empty());
}

void ModelSynchronizer::MakeJoin() {
  const auto begin = [this] {
    FollowIncarnation();
    CheckFinished();
  };
  join_ = std::make_unique<ModelJoin>(
      ModelJoin::Parts{.synchronizer = *this,
                       .model = *model_,
                       .options = options_,
                       .group = group_,
                       .statistics = *statistics_,
                       .buffers = buffers_,
                       .reducer = *reducer_,
                       .delayed = delayed_.get(),
                       .begin = begin,
                       .equalize = [this](int source) { Equalize(source); }});
}

void ModelSynchronizer::Equalize(int source) {
  BroadcastState(Tensors(), source);
  if (statistics_->has_layers() && !options_.broadcast_buffers) statistics_->Broadcast(source);
  statistics_->set_may_differ(false);
  replica_check_.Restart();
}

void ModelSynchronizer::BroadcastState(const ModelTensors& tensors, int source) const {
  std::vector<NamedTensor> state = tensors.parameters;
  if (options_.broadcast_buffers) {
    state.insert(state.end(), tensors.buffers.begin(), tensors.buffers.end());
  }
  Broadcast(group_->communicator(), state,
            {.rank = group_->rank(), .root = source, .what = "the broadcast of the model"});
}

void ModelSynchronizer::SetUpMixedPrecision(const ModelTensors& tensors) {
  const MixedPrecision& config = *options_.mixed_precision;
  if (config.buffer_dtype.has_value()) {
    CastBuffers(WithoutNames(tensors.buffers), *config.buffer_dtype);
  }
  if (config.reduction_dtype().has_value()) {
    reducer_->RegisterHook(kMixedPrecisionHook, {.first = [this](GradBucket& bucket) {
                             return reduce_dtype_hook(
                                 group_, *options_.mixed_precision->reduction_dtype())(bucket);
                           }});
  }
  if (!config.param_dtype.has_value()) return;
  mixed_precision_ = std::make_unique<MixedPrecisionParameters>(WithoutNames(tensors.parameters),
                                                                *config.param_dtype);
  reducer_->set_backward_callbacks({.begin = [this] { mixed_precision_->BeginBackward(); },
                                    .end = [this] { mixed_precision_->EndBackward(); }});
}

// ---- Forward.

void ModelSynchronizer::BeforeForward() {
  statistics_->BeginForward();
  if (at::GradMode::is_enabled()) {
    BeginIteration();
  } else {
    TellListeners(/*collective=*/false);
    if (statistics_->InTraining()) {
      group_->ensure_usable();
      FollowIncarnation();
      group_->communicator().EndBarrier();
    }
  }
  if (mixed_precision_) mixed_precision_->BeginForward();
  reducer_->BeginForward();
}

void ModelSynchronizer::BeginIteration() {
  wrapped_->CheckFrozen();
  reducer_->AwaitBackward();  // it may report a failure yet, which belongs to this incarnation
  group_->ensure_usable();
  FollowIncarnation();
  reducer_->CheckFinished();
  TellListeners(/*collective=*/synchronize_);
  if (reducer_->ParametersChanged()) FollowParameters();
  if (!synchronize_) {
    if (SyncsBuffers()) buffers_.NoteForward();
    if (statistics_->has_layers()) group_->communicator().EndBarrier();
    return;
  }
  if (!change_.empty()) {
    AgreeOnModel(*group_, MetadataOf(options_, Tensors()), "models", change_);
    reducer_->Reset(ReducedOver());  // now all ranks may agree on the buckets
    change_.clear();
  }
  const bool sampled = timer_.IsSampled(++iteration_);
  timer_.StartIteration(iteration_, sampled ? MonotonicNanoseconds() : 0);
  // A failure of this iteration must not reach a rank that is still in a constructor.
  group_->communicator().EndBarrier();
  if (sampled) wrapped_->CheckAll(*model_, options_.params_and_buffers_to_ignore);
  CompareReplicas();
  SyncForward();
}

// Under a Join the ranks make different numbers of forwards.
void ModelSynchronizer::CompareReplicas() {
  if (join_->active() || group_->size() == 1 || !replica_check_.Due()) return;
  ReplicaCheck::Compare(Tensors().parameters, iteration_, group_->communicator());
}

void ModelSynchronizer::TellListeners(bool collective) const {
  for (const Listener& listener : on_forward_) {
    if (const auto owner = listener.owner.lock()) listener.run(collective);
  }
}

void ModelSynchronizer::FollowIncarnation() {
  if (group_->incarnation() == incarnation_) return;
  incarnation_ = group_->incarnation();
  statistics_->set_may_differ(true);
  replica_check_.Restart();
  buffers_.Abandon();
  reducer_->ResetAfterFailure(ReducedOver());
  if (delayed_) delayed_->Reset(ReducedOver());
}

// Follows a parameter that the module's to() has given a new type or device. Such a parameter has a
// new gradient accumulator without the reducer's hook.
void ModelSynchronizer::FollowParameters() {
  if (join_->active()) {
    throw ConfigurationError(absl::StrCat(
        "rank ", group_->rank(),
        ": a parameter has changed its type, device or shape under a Join: finish the Join first"));
  }
  CheckPlacement(options_, Tensors(), *group_);
  if (change_.empty()) change_ = reducer_->DescribeChange();
  reducer_->FollowParameters(GivenPlan(options_.bucket_layout, reducer_->parameters()));
  if (delayed_) delayed_->Reset(ReducedOver());
}

bool ModelSynchronizer::SyncsBuffers() const {
  return options_.forward_sync_buffers.value_or(options_.broadcast_buffers);
}

void ModelSynchronizer::SyncForward() {
  // A Join makes them equal at its end.
  if (statistics_->may_differ() && !join_->active()) statistics_->Broadcast(0);
  const bool sync = SyncsBuffers();
  const BufferSync::Buffers buffers = sync ? buffers_.Read() : BufferSync::Buffers();
  const bool before = sync && buffers_.Due(BufferCommHookLocation::kPreForward, buffers);
  const bool after = sync && buffers_.Due(BufferCommHookLocation::kPostForward, buffers);
  const int source = join_->AnnounceForward(before, after);
  if (before) buffers_.Run(*group_, BufferCommHookLocation::kPreForward, source, buffers);
}

void ModelSynchronizer::AfterForward(const std::vector<at::Tensor>& outputs, bool complete) {
  RunAfterForward(outputs, complete);
  statistics_->EndForward();  // after an exception, OnForwardException() does it
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
  const bool collectives = statistics_->has_layers() && (synchronize_ || statistics_->InTraining());
  reducer_->EndForward(outputs, {.complete = complete,
                                 .synchronize = synchronize_,
                                 .collectives = collectives,
                                 .training = model_->is_training()});
}

void ModelSynchronizer::ThrowNoOutputs(bool complete) {
  const std::string message = NoOutputsMessage(group_->rank(), complete);
  group_->report_failure(message);
  throw ConfigurationError(message);
}

void ModelSynchronizer::OnForwardException() {
  statistics_->EndForward();
  if (mixed_precision_) mixed_precision_->EndForward(/*backward_may_follow=*/false);
  if ((!at::GradMode::is_enabled() || !synchronize_) && !statistics_->InTraining()) return;
  std::string text = "an exception that is no std::exception";
  try {
    throw;
  } catch (const CommunicationError& error) {
    text = error.what_without_backtrace();
    // Otherwise the error is that of another group, or of a remote call: news to the ranks.
    if (group_->failed()) {
      if (!statistics_->own_groups().empty()) ReducedOver()->report_failure(text);
      return;  // all ranks know, or find the error themselves; the same for the next one
    }
  } catch (const ReductionError&) {
    return;
  } catch (const std::exception& error) {
    text = MessageOf(error);
  } catch (...) {
  }
  ReducedOver()->report_failure(
      absl::StrCat("rank ", group_->rank(), ": the forward threw: ", text));
}

// A parameter that the program has replaced is unused from then on: find_unused_parameters would
// let its successor train on this rank alone.
void ModelSynchronizer::CheckUnused() {
  if (reducer_->unused() == unused_) return;
  unused_ = reducer_->unused();
  wrapped_->CheckAll(*model_, options_.params_and_buffers_to_ignore);
}

void ModelSynchronizer::OnReductionComplete() {
  join_->OnReductionComplete();
  CheckUnused();
  buffers_.Finish(*group_);
  if (delayed_ && !reducer_->parameters().empty()) delayed_->Complete(reducer_->divisor());
  if (!timer_.active()) return;
  const Reducer::PassTimes& times = reducer_->times();
  timer_.StartCommunication(times.first_launch_ns);
  timer_.EndCompute(times.last_gradient_ns);
  timer_.EndCommunication(times.complete_ns);
  if (IsUsageDue(timer_.samples())) ReportUsage(LoggingData());
  if (CurrentDebugLevel() == DebugLevel::kDetail) LOG(INFO) << LoggingData().to_json();
}

void ModelSynchronizer::WarnOfBareBackward(const std::string& parameter) {
  if (warned_of_bare_backward_ || !synchronize_ || !model_->is_training()) return;
  warned_of_bare_backward_ = true;
  LOG(WARNING) << BareBackwardMessage(group_->rank(), parameter);
}

// Warns once of a leaf that may have taken the place of one of the unused parameters. Returns false
// when the search is to be made again with the same ones. The module's own parameters are no
// strangers: they are ignored ones, or errors of their own (see CheckUnused()).
bool ModelSynchronizer::LookForStranger(const std::vector<int>& unused) {
  if (warned_of_stranger_) return true;
  if (!model_->is_training()) return false;
  std::vector<at::Tensor> unused_tensors;
  for (const int index : unused) unused_tensors.push_back(reducer_->parameters()[index].tensor);
  std::vector<at::Tensor> known;
  for (const NamedTensor& item : model_->parameters()) known.push_back(item.tensor);
  const auto [like, leaf] = FindStranger(unused_tensors, known);
  if (!leaf.defined()) return true;
  warned_of_stranger_ = true;
  const std::string shape =
      absl::StrCat(c10::toString(leaf.scalar_type()), "[", absl::StrJoin(leaf.sizes(), ", "), "]");
  LOG(WARNING) << StrangerMessage(group_->rank(), reducer_->parameters()[unused[like]].name, shape);
  return true;
}

// ---- Functions for users.

void ModelSynchronizer::UpdateProcessGroup(std::shared_ptr<ProcessGroup> group) {
  if (!group) throw ConfigurationError("update_process_group needs a process group");
  if (join_->active()) {
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
  if (reducer_->hook_name() != kMixedPrecisionHook) {
    CheckFollows(reducer_->hook(), absl::StrCat("the comm hook \"", reducer_->hook_name(), "\""),
                 group_);
  }
  CheckFollows(buffers_.hook(), "the buffer comm hook", group_);
  ModelStatistics::Groups own_groups = statistics_->OwnGroups(ModelGroup(group));
  const ModelTensors tensors = Tensors();
  tensors.CheckDevices(group->device(), group->backend());
  AgreeOnModel(*group, MetadataOf(options_, tensors));
  if (auto* hook = reducer_->hook().target<GroupCommHook>()) hook->group = group;
  if (auto* hook = buffers_.hook().target<GroupBufferCommHook>()) hook->group = group;
  if (group_->incarnation() != incarnation_) statistics_->set_may_differ(true);
  TakeGroup(std::move(group), std::move(own_groups));
  incarnation_ = group_->incarnation();
  replica_check_.Restart();
  buffers_.Abandon();
  reducer_->Reset(ReducedOver());
  if (delayed_) delayed_->Reset(ReducedOver());
  group_->communicator().BeginBarrier(group_->device(), "the end of update_process_group");
}

void ModelSynchronizer::SetManualFinalization(bool manual) {
  if (manual && !options_.delay_all_reduce_named_params.empty()) {
    throw ConfigurationError(
        "require_manual_backward_finalization and delay_all_reduce_named_params do not go "
        "together: the average of the delayed gradients is complete when the backward returns");
  }
  reducer_->SetManualFinalization(manual);
}

bool ModelSynchronizer::FinalizesAfterBackward() const {
  if (!reducer_->manual_finalization()) return false;
  return options_.mixed_precision.has_value() || reducer_->ends_after_backward();
}

void ModelSynchronizer::SetBucketLayout(std::vector<std::vector<std::string>> layout) {
  if (layout.empty()) throw ConfigurationError("set_bucket_layout needs at least one bucket");
  if (join_->active()) {
    throw ConfigurationError("set_bucket_layout cannot be called under a Join: finish it first");
  }
  reducer_->CheckFinished();
  BucketPlan plan = *GivenPlan(layout, reducer_->parameters());
  // Options count once all ranks have agreed on them: a refused layout leaves the old one.
  DistributedDataParallelOptions options = options_;
  options.bucket_layout = std::move(layout);
  AgreeOnModel(*group_, MetadataOf(options, Tensors()));
  options_ = std::move(options);
  reducer_->UsePlan(std::move(plan));
  first_bucket_sizes_ = BucketSizes(*reducer_);
}

// ---- Agreement.

ModelTensors ModelSynchronizer::Tensors() const {
  return ModelTensors::Of(*model_, options_.params_and_buffers_to_ignore);
}

void ModelSynchronizer::TakeGroup(std::shared_ptr<ProcessGroup> group,
                                  std::vector<std::shared_ptr<ModelGroup>> own_groups) {
  group_ = std::move(group);
  statistics_->UseGroup(std::make_shared<ModelGroup>(group_), std::move(own_groups));
}

// Returns the model's group. Its failure reports also go to the layers' own groups.
std::shared_ptr<ModelGroup> ModelSynchronizer::ReducedOver() const {
  return std::make_shared<ModelGroup>(group_, statistics_->own_groups());
}

// Runs in the first pass, because registering a hook is not a collective.
void ModelSynchronizer::AgreeOnHooks() const {
  if (group_->size() == 1) return;
  const ModelMetadata metadata =
      HookMetadataOf(reducer_->hook_name(), reducer_->hook_rounds(), buffers_.HookText());
  AgreeOnModel(*group_, metadata, "comm hooks (register the same on all of them)");
}

// ---- Reports.

DDPLoggingData ModelSynchronizer::LoggingData() const {
  DDPLoggingData data;
  data.module_name = model_->name();
  data.backend_name = group_->backend();
  data.world_size = group_->size();
  data.rank = group_->rank();
  FillOptions(options_, data);
  data.join_uneven_inputs = join_->was_active();
  data.has_sync_bn = statistics_->has_layers();
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
