#include "ddp/reducer.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/error.h"
#include "ddp/logging.h"
#include "ddp/process_group.h"

namespace ddp {
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
                            .kind = kind.first->second});
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
    return outputs;  // an accumulator has none
  }

 private:
  Reducer* const reducer_;
  const int parameter_;
};

Reducer::Reducer(std::vector<Parameter> parameters, std::shared_ptr<ProcessGroup> group,
                 const Options& options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(options),
      descriptions_(Describe(parameters_)),
      rebuilt_(options.plan.has_value()),
      ready_pass_(parameters_.size(), 0) {
  BucketPlan plan =
      options.plan.has_value()
          ? *options.plan
          : OrThrow(BucketPlan::AssignReversed(descriptions_, options.bucket_limits_bytes));
  buckets_ = std::make_unique<FlatBuckets>(std::move(plan), Tensors(), group_->size(),
                                           options.gradient_as_bucket_view);
  ready_order_.reserve(parameters_.size());
  AddHooks();
}

Reducer::~Reducer() {
  for (const Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
}

void Reducer::AddHooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // Held by us: the parameter itself holds its accumulator only weakly.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    const uintptr_t key =
        accumulator->add_post_hook(std::make_unique<GradientHook>(this, static_cast<int>(i)));
    hooks_.push_back({std::move(accumulator), key});
  }
}

std::vector<at::Tensor> Reducer::Tensors() const {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  return tensors;
}

std::vector<std::vector<std::string>> Reducer::plan_names() const {
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters_) names.push_back(parameter.name);
  return plan().Names(names);
}

void Reducer::BeginForward() {
  if (state_ == State::kReducing) ThrowUnfinished();
}

void Reducer::BeginBackward(bool synchronize) {
  if (!synchronize) {
    // An earlier forward's backward may still be to come; it stays synchronized.
    if (state_ == State::kDone) state_ = State::kLocal;
    return;
  }
  state_ = State::kExpecting;
  ++pass_;
  next_bucket_ = 0;
  launched_.clear();
  launched_.reserve(buckets_->count());
  missing_.resize(buckets_->count());
  for (int b = 0; b < buckets_->count(); ++b) {
    missing_[b] = static_cast<int>(plan().buckets()[b].parameters.size());
  }
  if (!rebuilt_) ready_order_.clear();
}

void Reducer::OnGradient(int parameter) {
  if (state_ == State::kLocal) return;
  if (state_ == State::kDone || ready_pass_[parameter] == pass_) {
    const std::string message = absl::StrCat(
        "rank ", group_->rank(), ": a second gradient for parameter ", parameters_[parameter].name,
        " after its gradient of this forward was reduced. A synchronized forward allows one "
        "backward: add the losses up and call backward once, or run every further backward after "
        "a forward of its own, or under no_sync()");
    // In the state kDone nobody waits for this rank: what all ranks share is complete.
    if (state_ == State::kReducing) group_->report_failure(message);
    throw ReductionError(message);
  }
  state_ = State::kReducing;
  ready_pass_[parameter] = pass_;
  if (!rebuilt_) ready_order_.push_back(parameter);  // reserved
  try {
    buckets_->CopyIn(parameter);
  } catch (const c10::Error& error) {
    group_->report_failure(absl::StrCat("rank ", group_->rank(), ": parameter ",
                                        parameters_[parameter].name, ": ",
                                        error.what_without_backtrace()));
    throw;
  }
  if (--missing_[buckets_->bucket_of(parameter)] == 0) LaunchReadyBuckets();
}

void Reducer::LaunchReadyBuckets() {
  Communicator& communicator = group_->communicator();
  while (next_bucket_ < buckets_->count() && missing_[next_bucket_] == 0) {
    launched_.push_back(
        communicator.AllReduce(buckets_->flat(next_bucket_),
                               absl::StrCat("the all-reduce of gradient bucket ", next_bucket_)));
    ++next_bucket_;
  }
  if (next_bucket_ == buckets_->count()) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { Finalize(); });
  }
}

void Reducer::Finalize() {
  for (int b = 0; b < buckets_->count(); ++b) {
    group_->communicator().Wait(launched_[b]);
    buckets_->CopyOut(b);
  }
  // Here, where every rank comes after the same collectives, whatever it does between backwards.
  if (!rebuilt_) RebuildBuckets();
  state_ = State::kDone;
}

void Reducer::RebuildBuckets() {
  const int64_t words = BucketPlan::EncodedSize(static_cast<int64_t>(parameters_.size()));
  at::Tensor message = at::zeros({words}, at::kInt);
  if (group_->rank() == 0) {
    const std::vector<int32_t> plan =
        OrThrow(BucketPlan::Assign(descriptions_, options_.bucket_limits_bytes, ready_order_))
            .Encode();
    std::copy(plan.begin(), plan.end(), message.mutable_data_ptr<int32_t>());
  }
  const at::Tensor sent = message.to(group_->device());
  group_->broadcast(sent, 0);
  message = sent.to(at::kCPU);
  const int32_t* first = message.const_data_ptr<int32_t>();
  BucketPlan plan =
      OrThrow(BucketPlan::Decode(std::vector<int32_t>(first, first + words), descriptions_));
  buckets_ = std::make_unique<FlatBuckets>(std::move(plan), Tensors(), group_->size(),
                                           options_.gradient_as_bucket_view);
  rebuilt_ = true;
}

void Reducer::ThrowUnfinished() {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (ready_pass_[i] != pass_) names.push_back(parameters_[i].name);
  }
  const std::string message = absl::StrCat(
      "rank ", group_->rank(),
      ": the last backward did not finish the reduction of gradients: no gradient came for ",
      names.empty() ? "(all came; the backward ended with an exception)"
                    : absl::StrJoin(names, ", "),
      ". Every parameter that requires a gradient must contribute to the loss of every "
      "synchronized backward, on every rank; freeze those that do not (set_requires_grad(false)) "
      "before wrapping the model");
  group_->report_failure(message);
  throw ReductionError(message);
}

}  // namespace ddp
