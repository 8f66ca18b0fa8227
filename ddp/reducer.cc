#include "ddp/reducer.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/debug_level.h"
#include "ddp/error.h"
#include "ddp/logging.h"
#include "ddp/name_list.h"
#include "ddp/process_group.h"
#include "ddp/torch_versions.h"

namespace ddp::internal {
namespace {

// The number of recent forwards kept for backwards that go through none of their outputs.
constexpr size_t kRecentForwards = 32;

// Describes the parameters for a plan. Parameters of one dtype and device get one kind.
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
      ready_pass_(parameters_.size(), 0),
      used_(parameters_.size(), 0),
      untouched_(parameters_.size(), 0),
      counts_(parameters_.size(), 0),
      remaining_(parameters_.size(), 0),
      last_seen_(parameters_.size(), 0) {
  order_.reserve(parameters_.size());
  given_plan_ = options_.plan;
  Reset(std::move(group));
  AddHooks();
}

Reducer::~Reducer() {
  RemoveHooks();
  if (InPass()) {
    Break(absl::StrCat("rank ", group_->rank(),
                       ": the model was destroyed before the reduction of its gradients was "
                       "complete: no gradient came for ",
                       Missing()));
  }
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
  for (size_t i = 0; i < untouched_.size(); ++i) {
    if (untouched_[i]) indices.push_back(static_cast<int>(i));
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
  launched_.reserve(buckets_->count());
  missing_.assign(buckets_->count(), 0);
  dropped_.assign(buckets_->count(), 0);
  hook_buckets_.clear();
}

void Reducer::TakeFirstPlan() {
  rebuilt_ = given_plan_.has_value();
  SetPlan(FirstPlan());
}

void Reducer::UsePlan(BucketPlan plan) {
  given_plan_ = std::move(plan);
  Reset(group_);
}

void Reducer::Reset(std::shared_ptr<ProcessGroup> group) {
  Clear(std::move(group));
  unsettled_ = false;
  TakeFirstPlan();
}

void Reducer::ResetAfterFailure(std::shared_ptr<ProcessGroup> group) {
  Clear(std::move(group));
  unsettled_ = true;
  SetPlan(BucketPlan(plan()));
}

void Reducer::Clear(std::shared_ptr<ProcessGroup> group) {
  group_ = std::move(group);
  state_ = State::kIdle;
  rebuild_requested_ = false;
  first_pass_begun_ = false;
  counted_ = false;
  untouched_known_ = false;
  outstanding_.clear();
  recent_.clear();
  unseen_.reset();
  searched_.clear();
  forwards_.clear();
  used_map_ = {};
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(untouched_.begin(), untouched_.end(), 0);
}

// Agrees on the buckets after a failure, in which some ranks may have got the new buckets and
// others not.
void Reducer::SettlePlan() {
  if (!unsettled_) return;
  bool rebuild_requested = false;
  bool agreed = false;
  try {
    agreed = AgreeOnPlan(&rebuild_requested);
  } catch (...) {
    Rethrow("the agreement on gradient buckets after a failure");
  }
  unsettled_ = false;
  if (agreed && rebuilt_) {
    if (!rebuild_requested) flags_ &= ~kRebuildAfter;
    return;
  }
  // The buckets need the parameters' own types, also inside a backward that lowers them.
  const bool in_backward = watch_.current().task >= 0;
  if (in_backward && callbacks_.end) callbacks_.end();
  TakeFirstPlan();
  if (in_backward && callbacks_.begin) callbacks_.begin();
}

// Returns true when all ranks have the same plan: the minimum of every number, and of its negative,
// then equals this rank's own.
bool Reducer::AgreeOnPlan(bool* rebuild_requested) {
  std::vector<int32_t> words = plan().Encode();
  words.push_back(rebuilt_ ? 1 : 0);
  const size_t count = words.size();
  for (size_t i = 0; i < count; ++i) words.push_back(-words[i]);
  words.push_back(rebuild_requested_ ? 0 : 1);
  at::Tensor least = at::empty({static_cast<int64_t>(words.size())}, at::kInt);
  std::copy(words.begin(), words.end(), least.mutable_data_ptr<int32_t>());
  least = least.to(group_->device());
  Communicator::Pending pending = group_->communicator().AllReduceMin(
      least, {"the agreement on gradient buckets after a failure"});
  group_->communicator().Wait(pending);
  least = least.to(at::kCPU);
  const int32_t* found = least.const_data_ptr<int32_t>();
  *rebuild_requested = found[2 * count] == 0;
  return std::equal(words.begin(), words.begin() + static_cast<int64_t>(2 * count), found);
}

void Reducer::RegisterHook(std::string name, CommHook hook) {
  if (comm_hook_) {
    throw ConfigurationError(absl::StrCat("a comm hook is registered already (", hook_name_,
                                          "): there can be one, for the model's whole life"));
  }
  if (pass_ > 0) {
    throw ConfigurationError("a comm hook has to be registered before the first backward");
  }
  hook_name_ = std::move(name);
  comm_hook_ = std::move(hook);
}

void Reducer::RequestRebuild() {
  CheckFinished();
  rebuild_requested_ = true;
  ForgetCounts();
}

void Reducer::CheckFinished() {
  if (InPass()) ThrowUnfinished();
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
  recent_.push_back(record);
  if (recent_.size() > kRecentForwards) recent_.pop_front();
  const bool seen = watched && complete && !outputs.empty();
  unseen_ = synchronize && !seen ? record : nullptr;
  if (!synchronize || !finds_unused()) return;
  const bool others = std::any_of(outstanding_.begin(), outstanding_.end(), [](const auto& weak) {
    const std::shared_ptr<ForwardRecord> forward = weak.lock();
    return forward && !forward->reduced;
  });
  if (others || ReachesAny(outputs, sorted_accumulators_)) {
    outstanding_.push_back(record);
    return;
  }
  // No gradient will ever come from this forward, but the peers wait for the reduction.
  forwards_.push_back(record);
  std::fill(record->outputs.begin(), record->outputs.end(), ForwardRecord::Output::kPassed);
  ReduceWithoutGradients();
}

// ---- The hot path: only array accesses, for every gradient.

void Reducer::OnGradient(int parameter) {
  if (state_ != State::kReducing && !EntersPass(parameter)) return;
  if (ready_pass_[parameter] == pass_) ThrowSecondGradient(parameter);
  used_[parameter] |= parameters_[parameter].tensor.grad().defined();
  if (counted_ && --remaining_[parameter] > 0) return;
  order_.push_back(parameter);  // capacity is reserved
  MarkReady(parameter);
  if (next_bucket_ == buckets_->count()) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { Finalize(); });
  }
}

void Reducer::MarkReady(int parameter) {
  ready_pass_[parameter] = pass_;
  try {
    const int bucket = buckets_->bucket_of(parameter);
    if (!dropped_[bucket]) buckets_->CopyIn(parameter);
    if (--missing_[bucket] == 0) {
      buckets_->FinishCopyIn(bucket);
      LaunchReadyBuckets();
    }
  } catch (...) {
    Rethrow(absl::StrCat("the gradient of parameter ", parameters_[parameter].name));
  }
}

void Reducer::LaunchReadyBuckets() {
  if (next_bucket_ == 0) current_times_.first_launch_ns = MonotonicNanoseconds();
  while (next_bucket_ < buckets_->count() && missing_[next_bucket_] == 0) Launch(next_bucket_++);
  if (next_bucket_ < buckets_->count()) return;
  current_times_.last_gradient_ns = MonotonicNanoseconds();
  if ((flags_ & kUsedMapAfter) != 0) StartUsedMap();
}

// ---- The beginning of a pass.

bool Reducer::EntersPass(int parameter) {
  if (state_ == State::kIdle || state_ == State::kOpen) {
    const Origin origin = FindOrigin(parameter);
    if (origin == Origin::kReduced) ThrowReduced(parameter);
    if (origin == Origin::kLocal) {
      // The gradient in the bucket is an earlier one; the average would overwrite this one.
      if (state_ == State::kOpen && ready_pass_[parameter] == pass_) ThrowSecondGradient(parameter);
      used_[parameter] |= parameters_[parameter].tensor.grad().defined();
      return false;
    }
    // For a backward through a watched output, the watch reports the end.
    const bool watched = watch_.current().task >= 0;
    if (!watched) {
      torch::autograd::Engine::get_default_engine().queue_callback([this] { OnBackwardEnd(); });
      forwards_.insert(forwards_.end(), searched_.begin(), searched_.end());
    }
    if (state_ == State::kOpen) {
      state_ = State::kReducing;
      return true;
    }
    BeginPass(reach_.unreached);
    if (state_ == State::kReducing) MarkUnused();
  }
  if (state_ == State::kReducing) return true;
  CountGradient(parameter);
  return false;
}

Reducer::Origin Reducer::FindOrigin(int parameter) {
  const BackwardWatch::Backward& backward = watch_.current();
  if (backward.task >= 0) {
    if (backward.synchronized.empty()) return Origin::kLocal;
    for (const auto& forward : backward.synchronized) {
      if (AwaitsReduction(*forward)) return Origin::kReduce;
    }
    return Origin::kReduced;
  }
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != searched_task_) {
    searched_task_ = task;
    searched_origin_ = SearchGraphForForwards(parameter);
  }
  return searched_origin_;
}

// Finds the forwards of a backward that has not gone through one of their outputs. Two examples:
// the loss is a tensor that the module kept in a member; or a penalty on a parameter gives its
// gradient before the backward reaches the output. The sequence numbers of the graph's nodes show
// the forward.
Reducer::Origin Reducer::SearchGraphForForwards(int parameter) {
  searched_.clear();
  if (finds_unused()) reach_ = ReachOfBackward(accumulators_);
  bool local = false;
  bool reduced = false;
  const auto take = [&](const std::shared_ptr<ForwardRecord>& forward) {
    const auto& outputs = forward->outputs;
    if (!forward->synchronized) {
      local = true;
    } else if (forward->reduced &&
               (!finds_unused() ||
                std::count(outputs.begin(), outputs.end(), ForwardRecord::Output::kReduced) ==
                    static_cast<int64_t>(outputs.size()))) {
      reduced = true;
    } else if (std::find(searched_.begin(), searched_.end(), forward) == searched_.end()) {
      searched_.push_back(forward);
    }
  };
  if (const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph()) {
    for (const torch::autograd::Node* node : *nodes) {
      if (const auto* forward = ForwardOf(*node)) take(*forward);
    }
  }
  if (searched_.empty() && !reduced && !local && unseen_ && !unseen_->reduced) take(unseen_);
  if (!searched_.empty()) return Origin::kReduce;
  if (reduced) return Origin::kReduced;
  if (!local && on_bare_backward_) on_bare_backward_(parameters_[parameter].name);
  return Origin::kLocal;
}

const std::shared_ptr<ForwardRecord>* Reducer::ForwardOf(const torch::autograd::Node& node) const {
  const uint64_t number = node.sequence_nr();
  for (auto forward = recent_.rbegin(); forward != recent_.rend(); ++forward) {
    const ForwardRecord& record = **forward;
    if (number >= record.first_node && number < record.end_node &&
        node.thread_id() == record.thread) {
      return &*forward;
    }
  }
  return nullptr;
}

// With find_unused_parameters, every backward is a reduction of its own, so each output of a
// forward may have one. Otherwise a reduction waits for all parameters.
bool Reducer::AwaitsReduction(const ForwardRecord& forward) const {
  if (!finds_unused()) return !forward.reduced;
  return std::find(forward.outputs.begin(), forward.outputs.end(),
                   ForwardRecord::Output::kPassed) != forward.outputs.end();
}

std::vector<int> Reducer::AllParameters() const {
  std::vector<int> all(parameters_.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

int Reducer::FlagsOfNextPass() const {
  const bool counting = must_count();
  const bool dynamic = finds_unused();
  int flags = 0;
  // Until the ranks agree on it, a rebuilt plan counts as none. SettlePlan() clears the flag again
  // when they agree.
  const bool rebuilt = rebuilt_ && (!unsettled_ || given_plan_.has_value());
  if (rebuild_requested_ || (!rebuilt && !dynamic)) flags |= kRebuildAfter;
  if (counting || (dynamic && !options_.skip_unused_buckets)) flags |= kUsedMapAfter;
  if (dynamic && options_.skip_unused_buckets) flags |= kUsedMapBefore;
  return flags;
}

void Reducer::BeginPass(std::vector<int> unused) {
  flags_ = FlagsOfNextPass();
  const Announce announce = announce_;  // a call may end the Join and unset announce_
  start_ = announce ? announce(flags_) : PassStart{.divisor = group_->size(), .source = 0};
  BeginFirstPass();
  SettlePlan();
  PrepareCounters();
  if (must_count()) {
    state_ = State::kCounting;
    std::fill(counts_.begin(), counts_.end(), 0);
    seen_ = 0;
    return;
  }
  state_ = State::kReducing;
  if (options_.static_graph) {
    remaining_ = counts_;
    return;
  }
  if (!options_.find_unused_parameters) return;
  unused_ = std::move(unused);
  if (pass_ == 1 && unused_.empty()) {
    LOG(WARNING) << "find_unused_parameters is set, and the first iteration used every parameter: "
                    "leave it off if that stays so, since it costs a search and an all-reduce each "
                    "time";
  }
  if (pass_ > 1 && unused_ != last_unused_) can_set_static_graph_ = false;
  last_unused_ = unused_;
  LogUnused(DebugLevel::kDetail);
}

void Reducer::BeginFirstPass() {
  if (!std::exchange(first_pass_begun_, true) && on_first_pass_) on_first_pass_();
}

void Reducer::LogUnused(DebugLevel least) const {
  if (CurrentDebugLevel() < least || unused_.empty()) return;
  std::vector<std::string> names;
  for (const int parameter : unused_) names.push_back(parameters_[parameter].name);
  LOG(INFO) << "rank " << group_->rank() << ": this iteration does not use " << NameList(names);
}

void Reducer::PrepareCounters() {
  ++pass_;
  next_bucket_ = 0;
  launched_.clear();
  order_.clear();
  std::fill(dropped_.begin(), dropped_.end(), 0);
  for (int b = 0; b < buckets_->count(); ++b) {
    missing_[b] = static_cast<int>(plan().buckets()[b].parameters.size());
  }
  buckets_->set_factor(comm_hook_ ? 1.0 : 1.0 / start_.divisor);
  current_times_ = {.first_gradient_ns = MonotonicNanoseconds()};
}

void Reducer::MarkUnused() {
  if (options_.skip_unused_buckets) AgreeOnUnused();
  for (const int parameter : unused_) MarkReady(parameter);
}

// Reduces zeros when no gradient has come and none will: the peers wait for this rank.
void Reducer::ReduceWithoutGradients() {
  BeginPass(AllParameters());
  MarkUnused();
  Finalize();
}

void Reducer::CountGradient(int parameter) {
  if (state_ == State::kBroken) {
    throw ReductionError(absl::StrCat("rank ", group_->rank(), ": a gradient for parameter ",
                                      parameters_[parameter].name,
                                      " after a reduction that failed: run a forward first"));
  }
  ++counts_[parameter];
  last_seen_[parameter] = ++seen_;
  used_[parameter] |= parameters_[parameter].tensor.grad().defined();
  ready_pass_[parameter] = pass_;
}

// ---- The end of a backward.

void Reducer::OnBackwardBegin() {
  if (finds_unused()) reach_ = ReachOfBackward(accumulators_);
  if (callbacks_.begin) callbacks_.begin();
}

void Reducer::OnBackwardEnd() {
  if (callbacks_.end) callbacks_.end();
  const auto& forwards = watch_.current().synchronized;
  const bool awaited = std::any_of(forwards.begin(), forwards.end(), [this](const auto& forward) {
    return AwaitsReduction(*forward);
  });
  if (state_ == State::kCounting || state_ == State::kReducing) {
    forwards_.insert(forwards_.end(), forwards.begin(), forwards.end());
    if (state_ == State::kCounting) return ReduceCounted();
    if (next_bucket_ < buckets_->count()) state_ = State::kOpen;
  } else if (state_ == State::kIdle && finds_unused() && awaited && !reach_.limited) {
    // The outputs of this backward reach no parameter.
    ReduceWithoutGradients();
  }
}

void Reducer::OnBackwardException() {
  if (callbacks_.end) callbacks_.end();
  bool awaited = InPass();
  for (const auto& forward : watch_.current().synchronized) {
    if (state_ == State::kIdle && AwaitsReduction(*forward)) awaited = true;
  }
  if (!awaited) return;
  Break(absl::StrCat("rank ", group_->rank(),
                     ": an exception ended the backward; this rank's own output says which. No "
                     "gradient had come for ",
                     state_ == State::kIdle ? "any parameter" : Missing()));
}

void Reducer::ReduceCounted() {
  counted_ = true;
  unused_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (counts_[i] == 0) unused_.push_back(static_cast<int>(i));
  }
  LogUnused(DebugLevel::kInfo);
  order_ = RecordedOrder();
  state_ = State::kReducing;
  for (const int parameter : order_) MarkReady(parameter);
  Finalize();
}

void Reducer::Launch(int bucket) {
  launched_.emplace_back();
  if (dropped_[bucket]) return;
  if (comm_hook_) return LaunchHook(bucket);
  if (buckets_->elements(bucket) > 0) {
    launched_.back().pending = group_->communicator().AllReduce(
        buckets_->flat(bucket), {"the all-reduce of gradient bucket", bucket});
  }
}

void Reducer::LaunchHook(int bucket) {
  if (hook_buckets_.size() != static_cast<size_t>(buckets_->count())) MakeHookBuckets();
  try {
    GradBucket& argument = *hook_buckets_[bucket];
    argument.set_buffer(buckets_->flat(bucket));
    launched_.back().future = comm_hook_(argument);
    if (!launched_.back().future) throw ReductionError("it returned no future");
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
  at::Tensor map = at::empty({static_cast<int64_t>(parameters_.size())}, at::kInt);
  std::copy(used_.begin(), used_.end(), map.mutable_data_ptr<int32_t>());
  used_map_ = group_->communicator().AllReduce(map.to(group_->device()),
                                               {"the all-reduce of used parameters"});
}

void Reducer::FinishUsedMap() {
  const at::Tensor sum = used_map_.tensor;
  group_->communicator().Wait(used_map_);
  used_map_ = {};
  const bool all_used = std::find(used_.begin(), used_.end(), 0) == used_.end();
  if (all_used && !options_.static_graph) {
    std::fill(untouched_.begin(), untouched_.end(), 0);
    return;  // on a GPU, the host need not wait for the result
  }
  const at::Tensor map = sum.to(at::kCPU);
  const int32_t* found = map.const_data_ptr<int32_t>();
  for (size_t i = 0; i < untouched_.size(); ++i) untouched_[i] = found[i] == 0;
  untouched_known_ = options_.static_graph;
}

// Marks the buckets that no rank uses. Each rank knows its own use from the search of the graph.
void Reducer::AgreeOnUnused() {
  if ((flags_ & kUsedMapBefore) != 0) {
    std::vector<uint8_t> used_already = used_;
    std::fill(used_.begin(), used_.end(), 1);
    for (const int parameter : unused_) used_[parameter] = used_already[parameter];
    StartUsedMap();
    FinishUsedMap();
    used_ = std::move(used_already);
  }
  FindDroppedBuckets();
}

void Reducer::FindDroppedBuckets() {
  for (int b = 0; b < buckets_->count(); ++b) {
    const std::vector<int>& members = plan().buckets()[b].parameters;
    dropped_[b] = std::all_of(members.begin(), members.end(),
                              [this](int parameter) { return untouched_[parameter] != 0; });
  }
}

void Reducer::Finalize() {
  if (state_ != State::kReducing && state_ != State::kCounting) return;  // broken in the meantime
  try {
    if (used_map_.tensor.defined()) FinishUsedMap();
    for (int b = 0; b < buckets_->count(); ++b) WaitAndCopyOut(b);
    ForgetLaunched();
    last_order_ = order_;
    buckets_reduced_ =
        buckets_->count() - static_cast<int>(std::count(dropped_.begin(), dropped_.end(), 1));
    // The rebuild is here because all ranks reach this point after the same collectives, whatever
    // they do between backwards.
    if ((flags_ & kRebuildAfter) != 0) RebuildBuckets(start_.source);
    FinishForwards();
    std::fill(used_.begin(), used_.end(), 0);
    current_times_.complete_ns = MonotonicNanoseconds();
    times_ = current_times_;
    state_ = State::kIdle;
    if (on_complete_) on_complete_();
  } catch (...) {
    Rethrow("the end of the backward");
  }
}

void Reducer::WaitAndCopyOut(int bucket) {
  Launched& launched = launched_[bucket];
  if (dropped_[bucket]) return buckets_->Discard(bucket);
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
  const bool mapped = (flags_ & (kUsedMapAfter | kUsedMapBefore)) != 0 || untouched_known_;
  // An empty bucket was not sent.
  const int replaced = buckets_->CopyOut(bucket, result.defined() ? result : buckets_->flat(bucket),
                                         mapped ? untouched_.data() : nullptr);
  if (replaced < 0) return;
  throw ReductionError(absl::StrCat(
      "the gradient of parameter ", parameters_[replaced].name,
      " is not the part of its bucket that gradient_as_bucket_view promises: something replaced it "
      "during the backward; let hooks change gradients in place"));
}

// Frees lazy buckets: they live only as long as the pass.
void Reducer::ForgetLaunched() {
  launched_.clear();
  if (options_.buckets.lazy) hook_buckets_.clear();
}

void Reducer::FinishForwards() {
  const auto& current = watch_.current().synchronized;  // not ended yet in a nested backward
  forwards_.insert(forwards_.end(), current.begin(), current.end());
  for (const auto& forward : forwards_) {
    forward->reduced = true;
    std::replace(forward->outputs.begin(), forward->outputs.end(), ForwardRecord::Output::kPassed,
                 ForwardRecord::Output::kReduced);
  }
  forwards_.clear();
  // Drops forwards older than the newest reduced one: they are assumed to have no backward.
  size_t keep_from = 0;
  for (size_t i = 0; i < outstanding_.size(); ++i) {
    const std::shared_ptr<ForwardRecord> forward = outstanding_[i].lock();
    if (!forward || forward->reduced) keep_from = i + 1;
  }
  outstanding_.erase(outstanding_.begin(), outstanding_.begin() + static_cast<int>(keep_from));
}

void Reducer::Shadow(int flags, int source) {
  flags_ = flags;
  start_ = {.divisor = 1, .source = source};
  BeginFirstPass();
  SettlePlan();
  PrepareCounters();
  try {
    std::fill(used_.begin(), used_.end(), 0);
    if ((flags_ & kUsedMapBefore) != 0) {
      StartUsedMap();
      FinishUsedMap();
    }
    if (options_.skip_unused_buckets && (flags_ & kUsedMapAfter) == 0) FindDroppedBuckets();
    for (int b = 0; b < buckets_->count(); ++b) {
      buckets_->Zero(b);
      Launch(b);
    }
    if ((flags_ & kUsedMapAfter) != 0) {
      StartUsedMap();
      FinishUsedMap();
    }
    for (int b = 0; b < buckets_->count(); ++b) {
      if (!launched_[b].future) {
        group_->communicator().Wait(launched_[b].pending);
      } else {
        group_->communicator().WaitFuture(launched_[b].future, {buckets_->flat(b)},
                                          {"the comm hook's result for gradient bucket", b});
      }
    }
    for (int b = 0; b < buckets_->count(); ++b) buckets_->Discard(b);
    ForgetLaunched();
    if ((flags_ & kRebuildAfter) != 0) RebuildBuckets(source);
    state_ = State::kIdle;
  } catch (...) {
    Rethrow("taking part with zeros in the reduction of the others");
  }
}

std::vector<int> Reducer::RecordedOrder() const {
  std::vector<int> order = order_;
  if (options_.static_graph) {
    order.clear();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (counts_[i] > 0) order.push_back(static_cast<int>(i));
    }
    std::sort(order.begin(), order.end(),
              [this](int a, int b) { return last_seen_[a] < last_seen_[b]; });
  }
  std::vector<bool> recorded(parameters_.size(), false);
  for (const int index : order) recorded[index] = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!recorded[i]) order.push_back(static_cast<int>(i));
  }
  return order;
}

void Reducer::RebuildBuckets(int source) {
  if (callbacks_.end) callbacks_.end();  // not called yet in a nested backward
  const int64_t words = BucketPlan::EncodedSize(static_cast<int64_t>(parameters_.size()));
  at::Tensor message = at::zeros({words}, at::kInt);
  if (group_->rank() == source) {
    std::vector<int> order = RecordedOrder();
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
  rebuilt_ = true;
  rebuild_requested_ = false;
  if (CurrentDebugLevel() != DebugLevel::kOff) {
    LOG(INFO) << "rank " << group_->rank() << ": new buckets\n" << plan().ToString(Names());
  }
}

// ---- Errors.

std::string Reducer::Missing() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (ready_pass_[i] != pass_) names.push_back(parameters_[i].name);
  }
  return names.empty() ? "(all came)" : NameList(names);
}

std::string Reducer::NamesOfBucket(int bucket) const {
  std::vector<std::string> names;
  for (const int index : plan().buckets()[bucket].parameters) {
    names.push_back(parameters_[index].name);
  }
  return absl::StrCat("gradient bucket ", bucket, " (", NameList(names), ")");
}

void Reducer::Break(const std::string& reason) {
  state_ = State::kBroken;
  error_ = reason;
  group_->report_failure(reason);
}

void Reducer::Rethrow(const std::string& about) {
  std::string text;
  try {
    throw;
  } catch (const CommunicationError& error) {
    state_ = State::kBroken;
    error_ = error.what_without_backtrace();
    // The peers know of the failure, unless it is in another group, which a hook may use.
    if (!group_->failed()) group_->report_failure(*error_);
    throw;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  const std::string prefix = absl::StrCat("rank ", group_->rank(), ": ");
  if (state_ == State::kBroken && absl::StartsWith(text, prefix)) throw;  // thrown by an inner step
  // The wait that threw may have named the operation already.
  const std::string message = absl::StartsWith(text, absl::StrCat(prefix, about))
                                  ? text
                                  : absl::StrCat(prefix, about, ": ", text);
  Break(message);
  throw ReductionError(message);
}

// No failure is reported: the pass that all ranks share is complete, so no peer waits for this
// rank.
void Reducer::ThrowReduced(int parameter) const {
  throw ReductionError(absl::StrCat(
      "rank ", group_->rank(), ": a second gradient for parameter ", parameters_[parameter].name,
      " after its gradient of this forward was reduced. A synchronized forward allows one "
      "backward: add the losses up and call backward once, or run every further backward after "
      "a forward of its own, or under no_sync()"));
}

void Reducer::ThrowSecondGradient(int parameter) {
  const std::string& name = parameters_[parameter].name;
  std::string message;
  if (options_.static_graph) {
    message = absl::StrCat(
        "rank ", group_->rank(), ": the graph has changed: parameter ", name, " got more than the ",
        counts_[parameter],
        " gradients that it got in the first synchronized backward, and static_graph promises "
        "that all backwards are alike. Leave static_graph off, or call rebuild_buckets() on all "
        "ranks before the graph changes");
  } else {
    message = absl::StrCat(
        "rank ", group_->rank(), ": a second gradient for parameter ", name,
        " while the reduction that its first one belongs to is not complete. Reasons: a second "
        "backward through the same outputs; a backward of the bare module before the last one of "
        "this forward; a re-entrant checkpoint of a segment that is used twice (use static_graph, "
        "or a checkpoint that is not re-entrant)",
        options_.find_unused_parameters
            ? "; a parameter of a re-entrant checkpoint, which find_unused_parameters cannot see"
            : "");
  }
  Break(message);
  throw ReductionError(message);
}

void Reducer::ThrowUnfinished() {
  const char* advice =
      "Every parameter that requires a gradient must contribute to the loss of every synchronized "
      "backward, on every rank: freeze those that never do (set_requires_grad(false)) before "
      "wrapping the model, or set find_unused_parameters when it depends on the input";
  if (options_.static_graph) {
    advice =
        "In the first synchronized backward each of them got a gradient, and static_graph promises "
        "that all backwards are alike: leave it off when the graph depends on the input";
  } else if (options_.find_unused_parameters) {
    advice =
        "The backward reaches them, but was called with inputs that leave them out: call it "
        "without "
        "inputs, or name every parameter";
  }
  const std::string message =
      absl::StrCat("rank ", group_->rank(),
                   ": the last backward did not finish the reduction of gradients: no gradient "
                   "came for ",
                   Missing(), ". ", advice);
  Break(message);
  throw ReductionError(message);
}

}  // namespace ddp::internal
