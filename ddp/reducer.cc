#include "ddp/reducer.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/debug_level.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/name_list.h"
#include "ddp/common/torch_versions.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

// Parameters of one dtype and device get one number.
std::vector<BucketPlan::Tensor> Describe(const std::vector<Reducer::Parameter>& parameters) {
  std::map<std::pair<std::string, at::ScalarType>, int> kinds;
  std::vector<BucketPlan::Tensor> descriptions;
  for (const Reducer::Parameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    const auto kind = kinds.try_emplace({tensor.device().str(), tensor.scalar_type()},
                                        static_cast<int>(kinds.size()));
    descriptions.push_back({.bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size()),
                            .kind = kind.first->second,
                            .sparse = parameter.sparse});
  }
  return descriptions;
}

BucketPlan OrThrow(absl::StatusOr<BucketPlan> plan) {
  if (plan.ok()) return *std::move(plan);
  throw ConfigurationError(
      absl::StrCat("the gradient buckets: ", std::string(plan.status().message())));
}

}  // namespace

class Reducer::GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(Reducer* reducer, int parameter) : reducer_(reducer), parameter_(parameter) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    reducer_->OnGradient(parameter_);
    return outputs;  // empty for an accumulator
  }

 private:
  Reducer* const reducer_;
  const int parameter_;
};

// A hook on one parameter's gradient accumulator.
struct Reducer::Hook {
  torch_versions::NodePtr accumulator;
  uintptr_t key = 0;
  // The parameter's state when the hook was set.
  at::ScalarType type;
  at::Device device;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

Reducer::Reducer(std::vector<Parameter> parameters, std::shared_ptr<ProcessGroup> group,
                 Options options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      descriptions_(Describe(parameters_)),
      given_plan_(options_.plan),
      core_(Names(), {.find_unused_parameters = options_.find_unused_parameters,
                      .static_graph = options_.static_graph,
                      .skip_unused_buckets = options_.skip_unused_buckets}) {
  Reset(std::move(group));
  AddHooks();
}

Reducer::~Reducer() {
  RemoveHooks();
  core_.OnDestruction();
  Run();
}

void Reducer::AddHooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // The hook owns the accumulator: the parameter holds it only weakly.
    const at::Tensor& tensor = parameters_[i].tensor;
    auto accumulator = torch::autograd::impl::grad_accumulator(tensor);
    const uintptr_t key =
        accumulator->add_post_hook(std::make_unique<GradientHook>(this, static_cast<int>(i)));
    hooks_.push_back({.accumulator = std::move(accumulator),
                      .key = key,
                      .type = tensor.scalar_type(),
                      .device = tensor.device(),
                      .sizes = tensor.sizes().vec(),
                      .strides = tensor.strides().vec()});
    accumulators_.push_back(hooks_.back().accumulator.get());
  }
  sorted_accumulators_ = accumulators_;
  std::sort(sorted_accumulators_.begin(), sorted_accumulators_.end());
}

void Reducer::RemoveHooks() {
  for (const Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  hooks_.clear();
  accumulators_.clear();
}

bool Reducer::ParametersChanged() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const Hook& hook = hooks_[i];
    if (torch::autograd::impl::try_get_grad_accumulator(tensor).get() != hook.accumulator.get() ||
        tensor.scalar_type() != hook.type || tensor.device() != hook.device ||
        tensor.sizes() != c10::IntArrayRef(hook.sizes) ||
        tensor.strides() != c10::IntArrayRef(hook.strides)) {
      return true;
    }
  }
  return false;
}

void Reducer::FollowParameters(std::optional<BucketPlan> plan) {
  at::NoGradGuard no_grad;
  RemoveHooks();
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
  descriptions_ = Describe(parameters_);
  given_plan_ = std::move(plan);
  AddHooks();
  Reset(group_);
}

std::vector<at::Tensor> Reducer::Tensors() const {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  return tensors;
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
  return OrThrow(BucketPlan::AssignReversed(descriptions_, options_.initial_limits_bytes));
}

void Reducer::SetPlan(BucketPlan plan) {
  FlatBuckets::Options options = options_.buckets;
  options.allocate = [group = group_](int64_t count, const at::TensorOptions& tensor_options) {
    return group->communicator().AllocateBuffer(count, tensor_options);
  };
  buckets_ = std::make_unique<FlatBuckets>(std::move(plan), Tensors(), Sparse(), options);
  launched_.clear();
  launched_.resize(buckets_->count());
  hook_buckets_.clear();
  core_.SetPlan(this->plan());
}

void Reducer::TakeFirstPlan() {
  SetPlan(FirstPlan());
  core_.SetFirstPlan(plan(), given_plan_.has_value());
}

void Reducer::UsePlan(BucketPlan plan) {
  given_plan_ = std::move(plan);
  Reset(group_);
}

void Reducer::Reset(std::shared_ptr<ProcessGroup> group) {
  Clear(std::move(group), /*unsettled=*/false);
  TakeFirstPlan();
}

void Reducer::ResetAfterFailure(std::shared_ptr<ProcessGroup> group) {
  Clear(std::move(group), /*unsettled=*/true);
  SetPlan(BucketPlan(plan()));
}

void Reducer::Clear(std::shared_ptr<ProcessGroup> group, bool unsettled) {
  group_ = std::move(group);
  core_.Reset(group_->rank(), unsettled);
  searched_.clear();
  used_map_ = {};
}

// The buckets need the parameters' own types, also inside a backward that lowers them.
void Reducer::ReturnToFirstPlan() {
  const bool in_backward = watch_.current().task >= 0;
  if (in_backward && callbacks_.end) callbacks_.end();
  TakeFirstPlan();
  if (in_backward && callbacks_.begin) callbacks_.begin();
  core_.OnFirstPlanTaken();
}

// Compares the plan over all ranks. The minimum of every number, and of its negative, equals this
// rank's own when all ranks have the same.
void Reducer::AgreeOnPlan() {
  std::vector<int32_t> words = plan().Encode();
  words.push_back(core_.rebuilt() ? 1 : 0);
  const size_t count = words.size();
  for (size_t i = 0; i < count; ++i) words.push_back(-words[i]);
  words.push_back(core_.rebuild_requested() ? 0 : 1);
  at::Tensor least = at::empty({static_cast<int64_t>(words.size())}, at::kInt);
  std::copy(words.begin(), words.end(), least.mutable_data_ptr<int32_t>());
  least = least.to(group_->device());
  Communicator::Pending pending = group_->communicator().AllReduceMin(
      least, {"the agreement on gradient buckets after a failure"});
  group_->communicator().Wait(pending);
  least = least.to(at::kCPU);
  const int32_t* found = least.const_data_ptr<int32_t>();
  core_.OnPlanAgreed(
      std::equal(words.begin(), words.begin() + static_cast<int64_t>(2 * count), found),
      /*rebuild_requested=*/found[2 * count] == 0);
}

void Reducer::RegisterHook(std::string name, CommHook hook) {
  if (comm_hook_) {
    throw ConfigurationError(absl::StrCat("a comm hook is registered already (", hook_name_,
                                          "): there can be one, for the model's whole life"));
  }
  if (core_.passes() > 0) {
    throw ConfigurationError("a comm hook has to be registered before the first backward");
  }
  hook_name_ = std::move(name);
  comm_hook_ = std::move(hook);
}

void Reducer::RequestRebuild() {
  CheckFinished();
  core_.RequestRebuild();
}

void Reducer::CheckFinished() {
  core_.OnCheck();
  Run();
}

void Reducer::BeginForward() { first_node_ = at::sequence_number::peek(); }

void Reducer::EndForward(const std::vector<at::Tensor>& outputs, bool complete, bool synchronize) {
  const auto record =
      std::make_shared<ForwardRecord>(ForwardRecord{.synchronized = synchronize,
                                                    .outputs = {},
                                                    .thread = at::RecordFunction::currentThreadId(),
                                                    .first_node = first_node_,
                                                    .end_node = at::sequence_number::peek()});
  const bool watched = watch_.Watch(outputs, record);
  core_.OnForwardEnd(record, /*seen=*/watched && complete && !outputs.empty());
  outputs_ = &outputs;
  const auto forget_outputs = absl::MakeCleanup([this] { outputs_ = nullptr; });
  Run();
}

// ---- Events.

// The hot path: only array accesses, for every gradient.
void Reducer::OnGradient(int parameter) {
  if (core_.asks_backward()) SearchGraph();
  core_.OnGradient(parameter, parameters_[parameter].tensor.grad().defined(), View());
  Run();
}

// Finds the forwards of a backward that has gone through none of their outputs, once for each
// backward. The sequence numbers of the graph's nodes show the forward.
void Reducer::SearchGraph() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (watch_.current().task >= 0 || task == searched_task_) return;
  searched_task_ = task;
  searched_.clear();
  if (core_.finds_unused()) reach_ = ReachOfBackward(accumulators_);
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (const torch::autograd::Node* node : *nodes) {
    const ForwardPtr* forward = core_.forwards().Find(node->thread_id(), node->sequence_nr());
    if (forward == nullptr) continue;
    if (std::find(searched_.begin(), searched_.end(), *forward) != searched_.end()) continue;
    searched_.push_back(*forward);
  }
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
  return {.watched = true,
          .forwards = watch_.current().synchronized,
          .unreached = reach_.unreached,
          .limited = reach_.limited};
}

void Reducer::OnBackwardBegin() {
  if (core_.finds_unused()) reach_ = ReachOfBackward(accumulators_);
  if (callbacks_.begin) callbacks_.begin();
}

void Reducer::OnBackwardEnd() {
  if (callbacks_.end) callbacks_.end();
  core_.OnBackwardEnd(ViewAtEnd());
  Run();
}

void Reducer::OnBackwardException() {
  if (callbacks_.end) callbacks_.end();
  core_.OnBackwardException(ViewAtEnd());
  Run();
}

void Reducer::Shadow(PassParts parts, int source) {
  core_.OnShadow(parts, source);
  Run();
}

// ---- Actions.

void Reducer::Run() {
  try {
    while (const std::optional<PassAction> action = core_.Next()) Do(*action);
  } catch (...) {
    core_.Abandon();
    throw;
  }
}

void Reducer::Do(const PassAction& action) {
  try {
    if (DoInBucket(action) || DoAtBeginning(action)) return;
    DoAtEnd(action);
  } catch (...) {
    const std::string about = About(action);
    if (about.empty()) throw;
    Rethrow(about);
  }
}

bool Reducer::DoInBucket(const PassAction& action) {
  switch (action.kind) {
    case PassAction::Kind::kZero:
      buckets_->Zero(action.index);
      return true;
    case PassAction::Kind::kCopyIn:
      buckets_->CopyIn(action.index);
      return true;
    case PassAction::Kind::kFinishCopyIn:
      buckets_->FinishCopyIn(action.index);
      return true;
    case PassAction::Kind::kLaunch:
    case PassAction::Kind::kSkip:
      if (action.index == 0) current_times_.first_launch_ns = MonotonicNanoseconds();
      if (action.kind == PassAction::Kind::kLaunch) Launch(action.index);
      if (action.index + 1 == buckets_->count()) {
        current_times_.last_gradient_ns = MonotonicNanoseconds();
      }
      return true;
    case PassAction::Kind::kStartUsedMap:
      StartUsedMap();
      return true;
    case PassAction::Kind::kWait:
      Wait(action.index);
      return true;
    case PassAction::Kind::kWaitAndCopyOut:
      WaitAndCopyOut(action.index);
      return true;
    case PassAction::Kind::kDiscard:
      buckets_->Discard(action.index);
      return true;
    default:
      return false;
  }
}

bool Reducer::DoAtBeginning(const PassAction& action) {
  switch (action.kind) {
    case PassAction::Kind::kSearchForward:
      core_.OnForwardSearched(ReachesAny(*outputs_, sorted_accumulators_));
      return true;
    case PassAction::Kind::kBareBackward:
      if (on_bare_backward_) on_bare_backward_(parameters_[action.index].name);
      return true;
    case PassAction::Kind::kCallAtEnd:
      torch::autograd::Engine::get_default_engine().queue_callback([this] { OnBackwardEnd(); });
      return true;
    case PassAction::Kind::kAnnounce: {
      const Announce announce = announce_;  // a call may end the Join and unset announce_
      core_.OnAnnounced(announce ? announce(core_.parts())
                                 : PassStart{.divisor = group_->size(), .source = 0});
      return true;
    }
    case PassAction::Kind::kFirstPass:
      if (on_first_pass_) on_first_pass_();
      core_.OnFirstPassReady();
      return true;
    case PassAction::Kind::kAgreeOnPlan:
      AgreeOnPlan();
      return true;
    case PassAction::Kind::kTakeFirstPlan:
      ReturnToFirstPlan();
      return true;
    case PassAction::Kind::kBegin:
      ForgetLaunched();
      buckets_->set_factor(comm_hook_ ? 1.0 : 1.0 / core_.start().divisor);
      current_times_ = {.first_gradient_ns = MonotonicNanoseconds()};
      return true;
    case PassAction::Kind::kWarnAllUsed:
      LOG(WARNING) << "find_unused_parameters is set, and the first iteration used every "
                      "parameter: leave it off if that stays so, since it costs a search and an "
                      "all-reduce each time";
      return true;
    case PassAction::Kind::kLogUnused:
      LogUnused(action.index == 0 ? DebugLevel::kInfo : DebugLevel::kDetail);
      return true;
    default:
      return false;
  }
}

void Reducer::DoAtEnd(const PassAction& action) {
  switch (action.kind) {
    case PassAction::Kind::kFinishAtEnd:
      torch::autograd::Engine::get_default_engine().queue_callback([this] {
        core_.Finish();
        Run();
      });
      return;
    case PassAction::Kind::kWaitUsedMap:
      WaitUsedMap();
      return;
    case PassAction::Kind::kForgetLaunched:
      ForgetLaunched();
      // A lazy bucket lives only as long as the pass.
      if (options_.buckets.lazy) hook_buckets_.clear();
      return;
    case PassAction::Kind::kRebuild:
      RebuildBuckets(action.index);
      return;
    case PassAction::Kind::kComplete:
      // A nested backward may end before the outer one.
      core_.OnComplete(watch_.current().synchronized);
      current_times_.complete_ns = MonotonicNanoseconds();
      times_ = current_times_;
      if (on_complete_) on_complete_();
      return;
    case PassAction::Kind::kReport:
      group_->report_failure(*core_.error());
      return;
    case PassAction::Kind::kReportAndThrow:
      group_->report_failure(*core_.error());
      throw ReductionError(core_.message());
    case PassAction::Kind::kThrow:
      throw ReductionError(core_.message());
    default:
      LOG(FATAL) << "no such action of a pass: " << static_cast<int>(action.kind);
  }
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

void Reducer::LogUnused(DebugLevel least) const {
  if (CurrentDebugLevel() < least || core_.unused().empty()) return;
  std::vector<std::string> names;
  for (const int parameter : core_.unused()) names.push_back(parameters_[parameter].name);
  LOG(INFO) << "rank " << group_->rank() << ": this iteration does not use " << NameList(names);
}

void Reducer::Launch(int bucket) {
  if (comm_hook_) return LaunchHook(bucket);
  if (buckets_->elements(bucket) > 0) {
    launched_[bucket].pending = group_->communicator().AllReduce(
        buckets_->flat(bucket), {"the all-reduce of gradient bucket", bucket});
  }
}

void Reducer::LaunchHook(int bucket) {
  if (hook_buckets_.size() != static_cast<size_t>(buckets_->count())) MakeHookBuckets();
  try {
    GradBucket& argument = *hook_buckets_[bucket];
    argument.set_buffer(buckets_->flat(bucket));
    launched_[bucket].future = comm_hook_(argument);
    if (!launched_[bucket].future) throw ReductionError("it returned no future");
  } catch (...) {
    Rethrow(hook_names_[bucket]);
  }
}

void Reducer::MakeHookBuckets() {
  hook_buckets_.clear();
  hook_names_.clear();
  for (int b = 0; b < buckets_->count(); ++b) {
    hook_names_.push_back(absl::StrCat("the comm hook, called for ", NamesOfBucket(b)));
    std::vector<at::Tensor> tensors;
    std::vector<std::string> names;
    for (const int index : plan().buckets()[b].parameters) {
      tensors.push_back(parameters_[index].tensor);
      names.push_back(parameters_[index].name);
    }
    hook_buckets_.push_back(
        std::make_unique<GradBucket>(GradBucket::Contents{.index = b,
                                                          .is_last = b + 1 == buckets_->count(),
                                                          .buffer = buckets_->flat(b),
                                                          .parameters = std::move(tensors),
                                                          .names = std::move(names)}));
  }
}

void Reducer::StartUsedMap() {
  const std::vector<uint8_t>& used = core_.used_map();
  at::Tensor map = at::empty({static_cast<int64_t>(used.size())}, at::kInt);
  std::copy(used.begin(), used.end(), map.mutable_data_ptr<int32_t>());
  used_map_ = group_->communicator().AllReduce(map.to(group_->device()),
                                               {"the all-reduce of used parameters"});
}

void Reducer::WaitUsedMap() {
  const at::Tensor sum = used_map_.tensor;
  group_->communicator().Wait(used_map_);
  used_map_ = {};
  if (!core_.wants_used_map()) return core_.OnUsedMap({});
  const at::Tensor map = sum.to(at::kCPU);
  const int32_t* found = map.const_data_ptr<int32_t>();
  core_.OnUsedMap({found, found + map.numel()});
}

void Reducer::Wait(int bucket) {
  Launched& launched = launched_[bucket];
  if (!launched.future) return group_->communicator().Wait(launched.pending);
  group_->communicator().WaitFuture(launched.future, {buckets_->flat(bucket)},
                                    {"the comm hook's result for gradient bucket", bucket});
}

void Reducer::WaitAndCopyOut(int bucket) {
  Launched& launched = launched_[bucket];
  at::Tensor result;
  if (launched.future) {
    try {
      group_->communicator().WaitFuture(launched.future, {buckets_->flat(bucket)},
                                        hook_names_[bucket].c_str());
    } catch (...) {
      Rethrow(hook_names_[bucket]);
    }
    result = CheckedHookResult(*hook_buckets_[bucket], launched.future->constValue());
  } else {
    group_->communicator().Wait(launched.pending);
    result = launched.pending.tensor;
  }
  // An empty bucket was not sent.
  const int replaced =
      buckets_->CopyOut(bucket, result.defined() ? result : buckets_->flat(bucket),
                        core_.untouched_is_known() ? core_.untouched().data() : nullptr);
  if (replaced < 0) return;
  throw ReductionError(absl::StrCat(
      "the gradient of parameter ", parameters_[replaced].name,
      " is not the part of its bucket that gradient_as_bucket_view promises: something replaced it "
      "during the backward; let hooks change gradients in place"));
}

void Reducer::ForgetLaunched() { std::fill(launched_.begin(), launched_.end(), Launched{}); }

void Reducer::RebuildBuckets(int source) {
  if (callbacks_.end) callbacks_.end();  // not called yet in a nested backward
  const int64_t words = BucketPlan::EncodedSize(static_cast<int64_t>(parameters_.size()));
  at::Tensor message = at::zeros({words}, at::kInt);
  if (group_->rank() == source) {
    std::vector<int> order = core_.RecordedOrder();
    if (options_.last_bucket_is_small) std::reverse(order.begin(), order.end());
    BucketPlan plan =
        OrThrow(BucketPlan::Assign(descriptions_, options_.rebuild_limits_bytes, order));
    if (options_.last_bucket_is_small) plan = plan.Reversed();
    const std::vector<int32_t> encoded = plan.Encode();
    std::copy(encoded.begin(), encoded.end(), message.mutable_data_ptr<int32_t>());
  }
  const at::Tensor sent = message.to(group_->device());
  group_->broadcast(sent, source);
  message = sent.to(at::kCPU);
  const int32_t* first = message.const_data_ptr<int32_t>();
  SetPlan(OrThrow(BucketPlan::Decode(std::vector<int32_t>(first, first + words), descriptions_)));
  core_.OnRebuilt();
  if (CurrentDebugLevel() != DebugLevel::kOff) {
    LOG(INFO) << "rank " << group_->rank() << ": new buckets\n" << plan().ToString(Names());
  }
}

// ---- Errors.

std::string Reducer::NamesOfBucket(int bucket) const {
  std::vector<std::string> names;
  for (const int index : plan().buckets()[bucket].parameters) {
    names.push_back(parameters_[index].name);
  }
  return absl::StrCat("gradient bucket ", bucket, " (", NameList(names), ")");
}

void Reducer::Break(const std::string& reason) {
  core_.Break(reason);
  group_->report_failure(reason);
}

void Reducer::Rethrow(const std::string& about) {
  std::string text;
  try {
    throw;
  } catch (const CommunicationError& error) {
    core_.Break(error.what_without_backtrace());
    // The peers know of the failure, unless it is in another group, which a hook may use.
    if (!group_->failed()) group_->report_failure(*core_.error());
    throw;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
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
