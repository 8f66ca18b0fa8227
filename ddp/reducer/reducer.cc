// Length: one method for each action of PassCore, all on the same tensors, hooks and communicator.

#include "ddp/reducer/reducer.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/debug_level.h"
#include "ddp/common/error.h"
#include "ddp/common/host_tensor.h"
#include "ddp/common/logging.h"
#include "ddp/common/name_list.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/reducer/current_backward.h"
#include "ddp/reducer/plan_agreement.h"

namespace ddp::internal {
namespace {

using PlanState = PassCore::PlanState;

// Of a gradient that no hook has brought. A variable, so that a choice between it and an input is a
// reference: the uses of an input count, see SoleBlockOf().
const at::Tensor kNoInput;

// Refuses what a backward in a distributed autograd context does not support.
void CheckContext(bool lowers_types, bool joins, bool manual) {
  if (GradientContext::running() == nullptr) return;
  const char* what = lowers_types ? "mixed_precision with a param_dtype"
                     : joins      ? "a Join"
                     : manual     ? "require_manual_backward_finalization"
                                  : nullptr;
  if (what == nullptr) return;
  throw ConfigurationError(absl::StrCat(
      what, " is not supported in a distributed autograd context: use a plain backward, or leave ",
      "the feature out"));
}

void WarnAllUsed() {
  LOG(WARNING) << "find_unused_parameters is set, and the first iteration used every parameter: "
                  "leave it off if that stays so, since it costs a search and a sum over the ranks "
                  "each time";
}

}  // namespace

Reducer::Reducer(std::vector<Parameter> parameters, std::shared_ptr<ModelGroup> group,
                 Options options)
    : parameters_(std::move(parameters)),
      tensors_(TensorsOf(parameters_)),
      uses_(AddressesOf(tensors_)),
      options_(std::move(options)),
      make_buckets_(options_.make_buckets ? options_.make_buckets : FlatBuckets::MakerOf({})),
      descriptions_(DescribeTensors(tensors_, Sparse())),
      hook_(tensors_, Names(), [this](const std::string& about) { Rethrow(about); }),
      given_plan_(options_.plan),
      core_(Names(), {.find_unused_parameters = options_.find_unused_parameters,
                      .static_graph = options_.static_graph,
                      .skip_unused_buckets = options_.skip_unused_buckets,
                      .collectives_in_backward = options_.collectives_in_backward}) {
  Reset(std::move(group));
  gradient_hooks_.Set(tensors_);
}

Reducer::~Reducer() {
  watch_.AwaitEnd();
  const EngineLock::Scope lock(*lock_);
  gradient_hooks_.Remove();
  core_.OnDestruction();
  try {
    Run();
  } catch (const std::exception& error) {
    LOG(ERROR) << "the end of a reducer on rank " << group_->rank() << ": " << error.what();
  }
}

void Reducer::FollowParameters(std::optional<BucketPlan> plan) {
  const EngineLock::Scope lock(*lock_);
  at::NoGradGuard no_grad;
  gradient_hooks_.Remove();
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    at::Tensor& gradient = tensor.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.sizes() != tensor.sizes()) {
      gradient.reset();
    } else {
      gradient = gradient.to(tensor.device(), tensor.scalar_type());
    }
  }
  descriptions_ = DescribeTensors(tensors_, Sparse());
  given_plan_ = std::move(plan);
  gradient_hooks_.Set(tensors_);
  Clear(group_, /*unsettled=*/false);
  TakeFirstPlan(/*collective=*/false);
}

std::string Reducer::DescribeChange() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const std::string change = gradient_hooks_.ChangeOf(i);
    if (!change.empty()) return absl::StrCat(parameters_[i].name, " (", change, ")");
  }
  return "";
}

std::vector<at::Tensor> Reducer::TensorsOf(const std::vector<Parameter>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

std::vector<const void*> Reducer::AddressesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> addresses;
  for (const at::Tensor& tensor : tensors) addresses.push_back(tensor.unsafeGetTensorImpl());
  return addresses;
}

std::vector<bool> Reducer::Sparse() const {
  std::vector<bool> sparse;
  for (const Parameter& parameter : parameters_) sparse.push_back(parameter.sparse);
  return sparse;
}

std::vector<std::string> Reducer::Names() const {
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters_) names.push_back(parameter.name);
  return names;
}

std::vector<int> Reducer::untouched() const {
  std::vector<int> indices;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (core_.untouched()[i] != 0) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

BucketPlan Reducer::FirstPlan() const {
  if (given_plan_.has_value()) return *given_plan_;
  return PlanOrThrow(BucketPlan::AssignReversed(descriptions_, options_.initial_limits_bytes));
}

void Reducer::SetPlan(BucketPlan plan, PlanState state, bool collective) {
  const bool hooked = hook_.registered() && options_.make_hook_buckets;
  const GradientBuckets::Factory& make = hooked ? options_.make_hook_buckets : make_buckets_;
  buckets_ =
      make({.plan = std::move(plan),
            .parameters = tensors_,
            .sparse = Sparse(),
            .sums_map = core_.finds_unused() && !options_.skip_unused_buckets,
            .communicator = [group = group_]() -> Communicator& { return group->communicator(); },
            .collective = collective,
            .uses = &uses_});
  hook_.SetPlan(this->plan());
  core_.SetPlan(this->plan(), state);
  SetMapCarrier();
}

// A comm hook sees the gradients of a bucket alone, so no map travels with them. In the first pass
// of a static graph the map has an all-reduce of its own: that pass then sums the same tensors as
// every other pass, and so the exact bits do not depend on which pass is the first one.
void Reducer::SetMapCarrier() {
  core_.SetMapCarrier(buckets_->carries_map() && !hook_.registered());
}

void Reducer::TakeFirstPlan(bool collective) {
  SetPlan(FirstPlan(), given_plan_.has_value() ? PlanState::kGiven : PlanState::kFirst, collective);
}

void Reducer::UsePlan(BucketPlan plan) {
  given_plan_ = std::move(plan);
  Reset(group_);
}

void Reducer::Reset(std::shared_ptr<ModelGroup> group) {
  const EngineLock::Scope lock(*lock_);
  Clear(std::move(group), /*unsettled=*/false);
  TakeFirstPlan();
}

void Reducer::ResetAfterFailure(std::shared_ptr<ModelGroup> group) {
  const EngineLock::Scope lock(*lock_);
  if (proof_ && *proof_ != DeviceOutcome::kProven) doubt_ = PassRecord::Doubt::kUnproven;
  proof_ = nullptr;
  Clear(std::move(group), /*unsettled=*/true);
  SetPlan(BucketPlan(plan()), core_.plan_state());
}

void Reducer::Clear(std::shared_ptr<ModelGroup> group, bool unsettled) {
  group_ = std::move(group);
  on_device_ = !group_->device().is_cpu();
  if (on_device_) lock_->Enable();
  streams_.Clear();
  core_.Reset(group_->rank(), unsettled);
  searched_.clear();
  iteration_ = 0;
  used_map_ = {};
}

// Calls `function` while the parameters have their own types, also inside a backward that lowers
// them.
void Reducer::InOwnTypes(const std::function<void()>& function) {
  const bool in_backward = watch_.current().task >= 0;
  if (in_backward && callbacks_.end) callbacks_.end();
  function();
  if (in_backward && callbacks_.begin) callbacks_.begin();
}

void Reducer::ReturnToFirstPlan() {
  InOwnTypes([this] { TakeFirstPlan(); });
  core_.OnFirstPlanTaken();
}

void Reducer::AgreeOnPlan() {
  const PlanComparison comparison = ComparePlans(plan(),
                                                 {.rebuilt = core_.rebuilt(),
                                                  .rebuild_requested = core_.rebuild_requested(),
                                                  .passes = complete_passes_,
                                                  .doubt = doubt_},
                                                 *group_);
  ResolveDoubt(comparison);
  core_.OnPlanAgreed(comparison.equal, comparison.rebuild_requested);
}

void Reducer::ResolveDoubt(const PlanComparison& comparison) {
  complete_passes_ = 0;
  if (comparison.equal_passes && comparison.doubt == PassRecord::Doubt::kNone) return;
  doubt_ = PassRecord::Doubt::kTold;
  if (comparison.doubt == PassRecord::Doubt::kUnproven) {
    throw ReductionError(
        "a failure has aborted a reduction of gradients after the backward had returned, so the "
        "optimizer may have stepped on wrong gradients: load model and optimizer from a checkpoint "
        "on every rank");
  }
  if (on_doubt_) InOwnTypes(on_doubt_);
  doubt_ = PassRecord::Doubt::kNone;
}

// Notes the end of a pass. See ResetAfterFailure().
void Reducer::Prove() {
  ++complete_passes_;
  proof_ = group_->communicator().Prove(group_->device());
}

void Reducer::RegisterHook(std::string name, CommHookRounds rounds) {
  if (hook_.registered()) {
    throw ConfigurationError(absl::StrCat("a comm hook is registered already (", hook_.name(),
                                          "): there can be one, for the model's whole life"));
  }
  if (core_.passes() > 0) {
    throw ConfigurationError("a comm hook has to be registered before the first backward");
  }
  const auto& further = rounds.further;
  if (!rounds.first || std::find(further.begin(), further.end(), nullptr) != further.end()) {
    throw ConfigurationError(
        absl::StrCat("a round of the comm hook \"", name, "\" is an empty function"));
  }
  hook_.Register(std::move(name), std::move(rounds));
  core_.SetRounds(hook_.rounds());
  if (options_.make_hook_buckets) TakeFirstPlan();
  SetMapCarrier();
}

void Reducer::RequestRebuild() {
  CheckFinished();
  core_.RequestRebuild();
}

void Reducer::CheckFinished() {
  watch_.AwaitEnd();
  const EngineLock::Scope lock(*lock_);
  core_.OnCheck();
  Run();
}

void Reducer::SetManualFinalization(bool manual) {
  const EngineLock::Scope lock(*lock_);
  core_.SetManual(manual);
  Run();
}

bool Reducer::ends_after_backward() const {
  // A hook of another model reads the gradient of a shared parameter later in the backward.
  bool shared = false;
  for (size_t i = 0; i < parameters_.size(); ++i) shared |= uses_.shared(i);
  return shared || core_.ends_after_backward();
}

void Reducer::FinalizeBackward(bool within) {
  const EngineLock::Scope lock(*lock_);
  core_.OnFinalize(within);
  Run();
}

void Reducer::BeginForward() { first_node_ = at::sequence_number::peek(); }

void Reducer::EndForward(const std::vector<at::Tensor>& outputs, const ForwardEnd& end) {
  const EngineLock::Scope lock(*lock_);
  const auto record =
      std::make_shared<ForwardRecord>(ForwardRecord{.synchronized = end.synchronize,
                                                    .collectives = end.collectives,
                                                    .outputs = {},
                                                    .thread = at::RecordFunction::currentThreadId(),
                                                    .first_node = first_node_,
                                                    .end_node = at::sequence_number::peek()});
  const bool watched = watch_.Watch(outputs, record);
  const bool seen = watched && end.complete && !outputs.empty();
  record->training = end.training && seen;
  if (end.synchronize && record->training) ++iteration_;
  core_.OnForwardEnd(record, seen);
  outputs_ = &outputs;
  const auto forget_outputs = absl::MakeCleanup([this] { outputs_ = nullptr; });
  Run();
}

// ---- Events.

// The hot path: only array accesses, for every gradient. Most gradients go into their bucket and
// ask for nothing else.
void Reducer::OnGradient(int parameter, const at::Tensor& input) {
  const EngineLock::Scope lock(*lock_);
  hooked_parameter_ = parameter;
  hook_input_ = &input;
  const auto forget = absl::MakeCleanup([this] { hooked_parameter_ = -1; });
  if (on_device_ && !tensors_[parameter].is_cpu()) {
    streams_.AddCurrent(tensors_[parameter].device());
  }
  const bool defined = GradientOf(tensors_[parameter]).defined();
  if (core_.OnPlainGradient(parameter, defined)) {
    return Do({.kind = PassAction::Kind::kCopyIn,
               .part = PassAction::Part::kGradient,
               .index = parameter,
               .cause = parameter});
  }
  if (core_.asks_backward()) {
    CheckContext(callbacks_.begin != nullptr, announce_ != nullptr, core_.manual());
    SearchGraph();
  }
  core_.OnGradient(parameter, defined, View());
  Run();
}

// Finds the forwards of a backward that has gone through none of their outputs, once for each
// backward. The sequence numbers of the graph's nodes show the forward.
void Reducer::SearchGraph() {
  const int task = BackwardTask();
  if (watch_.current().task >= 0 || task == searched_task_) return;
  searched_task_ = task;
  searched_.clear();
  buckets_->OnBackward(/*begins=*/true);
  if (core_.finds_unused()) reach_ = ReachOfBackward(gradient_hooks_.accumulators());
  ForEachNodeOfBackward([this](const torch::autograd::Node& node) {
    const ForwardPtr* forward = core_.forwards().Find(node.thread_id(), node.sequence_nr());
    if (forward == nullptr) return;
    CheckForwardInContext(**forward);
    if (std::find(searched_.begin(), searched_.end(), *forward) != searched_.end()) return;
    searched_.push_back(*forward);
  });
}

BackwardView Reducer::View() const {
  const BackwardWatch::Backward& watched = watch_.current();
  const bool is_watched = watched.task >= 0;
  return {.task = is_watched ? watched.task : searched_task_,
          .watched = is_watched,
          .forwards = is_watched ? watched.synchronized : searched_,
          .unreached = reach_.unreached,
          .limited = reach_.limited};
}

BackwardView Reducer::ViewAtEnd() const {
  const GradientContext* const context = GradientContext::running();
  return {.watched = true,
          .forwards = watch_.current().synchronized,
          .unreached = reach_.unreached,
          .limited = reach_.limited,
          .collectives = watch_.current().collectives,
          .failure = context == nullptr ? std::string() : context->failure()};
}

void Reducer::OnBackwardBegin() {
  CheckContext(callbacks_.begin != nullptr, announce_ != nullptr, core_.manual());
  if (core_.finds_unused()) reach_ = ReachOfBackward(gradient_hooks_.accumulators());
  buckets_->OnBackward(/*begins=*/true);
  if (callbacks_.begin) callbacks_.begin();
}

void Reducer::OnBackwardEnd() {
  buckets_->OnBackward(/*begins=*/false);
  if (callbacks_.end) callbacks_.end();
  core_.OnBackwardEnd(ViewAtEnd());
  Run();
}

void Reducer::OnBackwardException() {
  buckets_->OnBackward(/*begins=*/false);
  if (callbacks_.end) callbacks_.end();
  core_.OnBackwardException(ViewAtEnd());
  Run();
}

void Reducer::Shadow(PassParts parts, PassStart start) {
  const EngineLock::Scope lock(*lock_);
  core_.OnShadow(parts, start);
  Run();
  Prove();
}

// ---- Actions.

void Reducer::Run() {
  try {
    while (const std::optional<PassAction> action = core_.Next()) Do(*action);
  } catch (...) {
    core_.Abandon();
    if (core_.broken()) buckets_->Abandon();
    throw;
  }
}

void Reducer::Do(const PassAction& action) {
  try {
    DoOrThrow(action);
  } catch (...) {
    const std::string about = About(action);
    if (about.empty()) throw;
    Rethrow(about);
  }
}

void Reducer::DoOrThrow(const PassAction& action) {
  using Kind = PassAction::Kind;
  const int index = action.index;
  switch (action.kind) {
    case Kind::kSearchForward:
      return core_.OnForwardSearched(ReachesAny(*outputs_, gradient_hooks_.sorted_accumulators()));
    case Kind::kBareBackward:
      return on_bare_backward_ ? on_bare_backward_(parameters_[index].name) : void();
    case Kind::kCallAtEnd:
      return CallAtEnd(&Reducer::OnBackwardEnd);
    case Kind::kAnnounce:
      return AnnouncePass();
    case Kind::kFirstPass:
      if (on_first_pass_) on_first_pass_();
      return core_.OnFirstPassReady();
    case Kind::kAgreeOnPlan:
      return AgreeOnPlan();
    case Kind::kTakeFirstPlan:
      return ReturnToFirstPlan();
    case Kind::kBegin:
      return BeginPass();
    case Kind::kWarnAllUsed:
      return WarnAllUsed();
    case Kind::kLogUnused:
      return TellUnused(index == 0 ? DebugLevel::kInfo : DebugLevel::kDetail);
    case Kind::kZero:
      return buckets_->Zero(index);
    case Kind::kCopyIn:
      return buckets_->CopyIn(index, index == hooked_parameter_ ? *hook_input_ : kNoInput);
    case Kind::kFinishCopyIn:
      JoinStreams(index);
      return buckets_->FinishCopyIn(index);
    case Kind::kLaunch:
    case Kind::kSkip:
      return LaunchOrSkip(action);
    case Kind::kStartUsedMap:
      return StartUsedMap();
    case Kind::kWaitUsedMap:
      return WaitUsedMap();
    case Kind::kAttachUsedMap:
      return buckets_->AttachMap(core_.used_map());
    case Kind::kTakeUsedMap:
      return TakeUsedMap(index);
    case Kind::kFinishAtEnd:
      return CallAtEnd(&Reducer::Finish);
    case Kind::kHold:
      return buckets_->Hold();
    case Kind::kNextRound:
      return hook_.NextRound(index, action.round, group_->communicator());
    case Kind::kWait:
      return Wait(index);
    case Kind::kWaitAndCopyOut:
      return WaitAndCopyOut(index);
    case Kind::kDiscard:
      return buckets_->Discard(index);
    case Kind::kForgetLaunched:
      return hook_.EndPass(/*release_buffers=*/buckets_->lazy());
    case Kind::kRebuild:
      return RebuildBuckets(index);
    case Kind::kComplete:
      return CompletePass();
    case Kind::kReport:
      return ReportFailure();
    case Kind::kReportAndThrow:
      ReportFailure();
      throw ReductionError(core_.message());
    case Kind::kThrow:
      throw ReductionError(core_.message());
  }
}

void Reducer::CallAtEnd(void (Reducer::*function)()) {
  AtBackwardEnd([this, function] {
    const EngineLock::Scope lock(*lock_);
    (this->*function)();
  });
}

void Reducer::Finish() {
  core_.Finish();
  Run();
}

void Reducer::AnnouncePass() {
  const Announce announce = announce_;  // a call may end the Join and unset announce_
  core_.OnAnnounced(announce ? announce(core_.parts())
                             : PassStart{.divisor = group_->size(), .source = 0});
}

void Reducer::BeginPass() {
  AgreeOnSkipped();
  hook_.EndPass(/*release_buffers=*/false);
  buckets_->set_factor(hook_.registered() ? 1.0 : 1.0 / core_.start().divisor);
  current_times_ = {.first_gradient_ns = MonotonicNanoseconds()};
}

void Reducer::CompletePass() {
  // A nested backward may end before the outer one.
  core_.OnComplete(watch_.current().synchronized);
  current_times_.complete_ns = MonotonicNanoseconds();
  times_ = current_times_;
  if (on_complete_) on_complete_();
  Prove();
  streams_.Clear();
}

void Reducer::ReportFailure() {
  group_->report_failure(*core_.error());
  buckets_->Abandon();
}

// Names the part of the pass for the message of an exception. Empty: the exception needs no more.
std::string Reducer::About(const PassAction& action) const {
  switch (action.kind) {
    case PassAction::Kind::kSearchForward:
    case PassAction::Kind::kBareBackward:
    case PassAction::Kind::kCallAtEnd:
    case PassAction::Kind::kFinishAtEnd:
    case PassAction::Kind::kReport:
    case PassAction::Kind::kReportAndThrow:
    case PassAction::Kind::kThrow:
      return "";
    case PassAction::Kind::kAgreeOnPlan:
      return "the agreement on gradient buckets after a failure";
    default:
      break;
  }
  switch (action.part) {
    case PassAction::Part::kGradient:
      return absl::StrCat("the gradient of parameter ", parameters_[action.cause].name);
    case PassAction::Part::kEnd:
      return "the end of the backward";
    case PassAction::Part::kShadow:
      return "taking part with zeros in the reduction of the others";
    case PassAction::Part::kBegin:
      return "";
  }
  return "";
}

// Costs one comparison where the unused parameters are those of the pass before.
void Reducer::TellUnused(DebugLevel least) {
  if (CurrentDebugLevel() >= least && !core_.unused().empty()) {
    std::vector<std::string> names;
    for (const int parameter : core_.unused()) names.push_back(parameters_[parameter].name);
    LOG(INFO) << "rank " << group_->rank() << ": this iteration does not use " << NameList(names);
  }
  if (!on_unused_ || core_.unused() == told_unused_) return;
  if (on_unused_(core_.unused())) told_unused_ = core_.unused();
}

// A rank that leaves out one backward would pair this pass with an older one of the others, in this
// step and in all later ones. The rank itself sees that it has left one out, and begins its next
// pass with this collective. Where all ranks have left out the same, all are here. Otherwise the
// others are in the reduction of their gradients, and all ranks throw the error of different
// collectives, with the name of this one. Under a Join, joined ranks have no forwards and could not
// answer. A forward that this backward will pass only later is in the backward's graph, which is
// searched where there is such a forward.
void Reducer::AgreeOnSkipped() {
  std::vector<ForwardPtr> left_out = core_.forwards().Unpassed();
  if (left_out.empty()) return;
  ForEachNodeOfBackward([&left_out](const torch::autograd::Node& node) {
    std::erase_if(left_out, [&node](const ForwardPtr& forward) {
      return forward->Created(node.thread_id(), node.sequence_nr());
    });
  });
  for (const ForwardPtr& forward : left_out) forward->skipped = true;
  if (left_out.empty() || announce_ || group_->size() == 1) return;
  Communicator::Pending pending = group_->communicator().AllReduce(
      at::zeros({1}, group_->device()),
      absl::StrCat("the agreement on ", left_out.size(), " iteration(s) without a backward before ",
                   "iteration ", iteration_,
                   " (to leave out a step, leave it out on all ranks: see ddp::all_agree())"));
  group_->communicator().Wait(pending);
}

// The gradients of a bucket may come on several streams. One that was allocated on another stream
// than the current one stays until the current one has read it.
void Reducer::JoinStreams(int bucket) {
  if (!on_device_ || !streams_.Join()) return;
  for (const int index : plan().buckets()[bucket].parameters) {
    const at::Tensor& gradient = GradientOf(tensors_[index]);
    if (gradient.defined() && !gradient.is_cpu() && !gradient.is_sparse()) {
      gradient.record_stream(CurrentStream(gradient.device()));
    }
  }
}

void Reducer::LaunchOrSkip(const PassAction& action) {
  const int bucket = action.index;
  if (bucket == 0) current_times_.first_launch_ns = MonotonicNanoseconds();
  if (action.kind == PassAction::Kind::kLaunch) {
    JoinStreams(bucket);
    if (hook_.registered()) {
      hook_.Start(bucket, buckets_->HookBuffer(bucket));
    } else {
      buckets_->Launch(bucket);
    }
  }
  if (bucket + 1 == buckets_->count()) current_times_.last_gradient_ns = MonotonicNanoseconds();
}

void Reducer::StartUsedMap() {
  const std::vector<uint8_t>& used = core_.used_map();
  const at::Device device = group_->device();
  at::Tensor map = HostTensorFor(device, static_cast<int64_t>(used.size()), at::kInt);
  std::copy(used.begin(), used.end(), map.mutable_data_ptr<int32_t>());
  used_map_ = group_->communicator().AllReduce(map.to(device, /*non_blocking=*/true),
                                               {"the all-reduce of used parameters"});
}

void Reducer::WaitUsedMap() {
  group_->communicator().Wait(used_map_);
  const Communicator::Pending complete = std::exchange(used_map_, {});
  if (!core_.wants_used_map()) return core_.OnUsedMap({});
  const at::Tensor map = group_->communicator().ToHost(complete.tensor, complete.what);
  const int32_t* found = map.const_data_ptr<int32_t>();
  core_.OnUsedMap({found, found + map.numel()});
}

void Reducer::TakeUsedMap(int bucket) {
  buckets_->Wait(bucket);
  core_.OnUsedMap(core_.wants_used_map() ? buckets_->AttachedSums() : std::vector<int32_t>());
}

void Reducer::Wait(int bucket) {
  if (!hook_.registered()) return buckets_->Wait(bucket);
  hook_.Wait(bucket, group_->communicator());
}

void Reducer::WaitAndCopyOut(int bucket) {
  at::Tensor result;
  if (hook_.registered()) {
    result = hook_.WaitForResult(bucket, group_->communicator());
  } else {
    buckets_->Wait(bucket);
  }
  const int replaced = buckets_->CopyOut(
      bucket, result, core_.untouched_is_known() ? core_.untouched().data() : nullptr);
  if (replaced >= 0) {
    throw ReductionError(absl::StrCat(
        "the gradient of parameter ", parameters_[replaced].name,
        " is not the part of its bucket that gradient_as_bucket_view promises: something replaced "
        "it during the backward; let hooks change gradients in place"));
  }
}

void Reducer::RebuildBuckets(int source) {
  if (callbacks_.end) callbacks_.end();  // not called yet in a nested backward
  BucketPlan mine = group_->rank() == source ? PlanForRebuild() : BucketPlan();
  SetPlan(BroadcastPlan(mine, descriptions_, source, *group_), PlanState::kRebuilt);
  if (CurrentDebugLevel() != DebugLevel::kOff) {
    LOG(INFO) << "rank " << group_->rank() << ": new buckets\n" << plan().ToString(Names());
  }
}

BucketPlan Reducer::PlanForRebuild() const {
  std::vector<int> order = core_.RecordedOrder();
  if (options_.last_bucket_is_small) std::reverse(order.begin(), order.end());
  const BucketPlan plan =
      PlanOrThrow(BucketPlan::Assign(descriptions_, options_.rebuild_limits_bytes, order));
  return options_.last_bucket_is_small ? plan.Reversed() : plan;
}

// ---- Errors.

void Reducer::Break(const std::string& reason) {
  core_.Break(reason);
  ReportFailure();
}

void Reducer::Rethrow(const std::string& about) {
  std::string text;
  try {
    throw;
  } catch (const CommunicationError& error) {
    core_.Break(error.what_without_backtrace());
    // A failure of this group may be news to groups of layers, and that of a hook's group to this
    // one. A group that has failed takes no second report.
    group_->report_failure(*core_.error());
    throw;
  } catch (const std::exception& error) {
    text = MessageOf(error);
  }
  const std::string prefix = absl::StrCat("rank ", group_->rank(), ": ");
  if (core_.broken() && absl::StartsWith(text, prefix)) throw;  // from an inner step
  // The wait that threw may have named the operation already.
  const std::string message = absl::StartsWith(text, absl::StrCat(prefix, about))
                                  ? text
                                  : absl::StrCat(prefix, about, ": ", text);
  Break(message);
  throw ReductionError(message);
}

}  // namespace ddp::internal
