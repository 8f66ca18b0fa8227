#include "ddp/rpc/distributed_optimizer.h"

#include <cmath>
#include <cstdint>
#include <tuple>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "absl/cleanup/cleanup.h"
#include "base/mutex.h"
#include "ddp/common/error.h"
#include "ddp/rpc/autograd_context.h"
#include "ddp/rpc/transport.h"

namespace ddp::rpc {

using torch::distributed::autograd::ContextPtr;
using torch::distributed::autograd::DistAutogradContainer;

namespace {

using Tensors = std::vector<at::Tensor>;
using ParameterState = std::unique_ptr<torch::optim::OptimizerParamState>;

constexpr char kStep[] = "ddp.rpc.optimizer_step";
constexpr char kState[] = "ddp.rpc.optimizer_state";
constexpr char kLoadState[] = "ddp.rpc.load_optimizer_state";

std::unique_ptr<torch::optim::Optimizer> Make(const OptimizerSpec& spec,
                                              std::vector<at::Tensor> parameters) {
  const std::vector<double>& options = spec.options;
  if (spec.name == "sgd" && options.size() == 3) {
    return std::make_unique<torch::optim::SGD>(
        std::move(parameters),
        torch::optim::SGDOptions(options[0]).momentum(options[1]).weight_decay(options[2]));
  }
  if (spec.name == "adagrad" && options.size() == 1) {
    return std::make_unique<torch::optim::Adagrad>(std::move(parameters),
                                                   torch::optim::AdagradOptions(options[0]));
  }
  if (spec.name == "adam" && options.size() == 2) {
    return std::make_unique<torch::optim::Adam>(
        std::move(parameters), torch::optim::AdamOptions(options[0]).weight_decay(options[1]));
  }
  throw ConfigurationError("there is no optimizer \"" + spec.name +
                           "\" with these options: use sgd(), adagrad() or adam()");
}

// Returns the state of a parameter, as DistributedOptimizer describes it. null: no step yet.
Tensors Write(const OptimizerSpec& spec, const torch::optim::OptimizerParamState* state,
              const at::Tensor& parameter) {
  const auto count = [](int64_t number) { return at::scalar_tensor(number, at::kLong); };
  const auto copy = [&](const at::Tensor& value) {
    if (!value.defined()) return at::zeros_like(parameter.detach());
    if (value.is_sparse()) {
      throw ConfigurationError("a momentum of sparse gradients cannot be saved");
    }
    return value.detach().clone();
  };
  if (spec.name == "adam") {
    const torch::optim::AdamParamState none;
    const auto& adam =
        state == nullptr ? none : static_cast<const torch::optim::AdamParamState&>(*state);
    return {count(adam.step()), copy(adam.exp_avg()), copy(adam.exp_avg_sq())};
  }
  if (spec.name == "adagrad") {
    const auto& adagrad = static_cast<const torch::optim::AdagradParamState&>(*state);
    return {count(adagrad.step()), copy(adagrad.sum())};
  }
  if (spec.options.at(1) == 0) return {};  // sgd without momentum
  const at::Tensor buffer =
      state == nullptr ? at::Tensor()
                       : static_cast<const torch::optim::SGDParamState*>(state)->momentum_buffer();
  return {count(buffer.defined() ? 1 : 0), copy(buffer)};
}

// The opposite of Write(). Null: LibTorch makes the state in the parameter's first step.
ParameterState Read(const OptimizerSpec& spec, const at::Tensor* written) {
  if (spec.name == "sgd" && spec.options.at(1) == 0) return nullptr;
  const int64_t steps = written[0].item<int64_t>();
  const auto copy = [&](int i) { return written[i].detach().clone(); };
  if (spec.name == "adagrad") {
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->step(steps);
    state->sum(copy(1));
    return state;
  }
  if (steps == 0) return nullptr;
  if (spec.name == "adam") {
    auto state = std::make_unique<torch::optim::AdamParamState>();
    state->step(steps);
    state->exp_avg(copy(1));
    state->exp_avg_sq(copy(2));
    return state;
  }
  auto state = std::make_unique<torch::optim::SGDParamState>();
  state->momentum_buffer(copy(1));
  return state;
}

// Throws unless `given` could be the state instead of `own`.
void CheckAlike(const Tensors& given, const Tensors& own) {
  if (given.size() != own.size()) {
    throw ConfigurationError("the optimizer's state has " + std::to_string(own.size()) +
                             " tensors, not " + std::to_string(given.size()));
  }
  for (size_t i = 0; i < own.size(); ++i) {
    if (given[i].defined() && given[i].layout() == at::kStrided &&
        given[i].scalar_type() == own[i].scalar_type() && given[i].sizes() == own[i].sizes()) {
      continue;
    }
    throw ConfigurationError("tensor " + std::to_string(i) +
                             " of the optimizer's state has another type or shape");
  }
}

// One optimizer, with the gradients of a context in place of `.grad`.
class ContextOptimizer {
 public:
  ContextOptimizer(OptimizerSpec spec, std::vector<at::Tensor> parameters)
      : spec_(std::move(spec)), parameters_(parameters), optimizer_(Make(spec_, parameters)) {}

  const OptimizerSpec& spec() const { return spec_; }

  void Step(const ContextPtr& context, double learning_rate) {
    const MutexLock lock(mutex_);
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(learning_rate);
    const c10::Dict<at::Tensor, at::Tensor> gradients = context->getGradients();
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : parameters_) before.push_back(parameter.grad());
    const absl::Cleanup restore = [&] {
      for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = before[i];
    };
    for (at::Tensor& parameter : parameters_) {
      const auto found = gradients.find(parameter);
      parameter.mutable_grad() = found == gradients.end() ? at::Tensor() : found->value();
    }
    optimizer_->step();
  }

  Tensors State() {
    const MutexLock lock(mutex_);
    Tensors all;
    for (const at::Tensor& parameter : parameters_) {
      for (at::Tensor& tensor : StateOf(parameter)) all.push_back(std::move(tensor));
    }
    return all;
  }

  void LoadState(const Tensors& given) {
    CheckAlike(given, ContextOptimizer(spec_, parameters_).State());
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      void* const key = parameters_[i].unsafeGetTensorImpl();
      optimizer_->state().erase(key);
      ParameterState state = Read(spec_, given.data() + i * given.size() / parameters_.size());
      if (state != nullptr) optimizer_->state()[key] = std::move(state);
    }
  }

 private:
  Tensors StateOf(const at::Tensor& parameter) const {
    const auto found = optimizer_->state().find(parameter.unsafeGetTensorImpl());
    return Write(spec_, found == optimizer_->state().end() ? nullptr : found->second.get(),
                 parameter);
  }

  const OptimizerSpec spec_;
  Mutex mutex_;
  std::vector<at::Tensor> parameters_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Returns the optimizer of an object of this worker, and makes it in the first call.
std::shared_ptr<ContextOptimizer> OptimizerOf(const internal::RemoteObject& object,
                                              const OptimizerSpec& spec) {
  if (object.parameters == nullptr) {
    throw ConfigurationError("the class " + object.class_name + " has no parameters()");
  }
  const auto optimizer = object.attachment->Get<ContextOptimizer>(
      [&] { return std::make_shared<ContextOptimizer>(spec, object.parameters()); });
  if (optimizer->spec() != spec) {
    throw ConfigurationError("the object has an optimizer \"" + optimizer->spec().name +
                             "\" with other options: give one spec on all workers");
  }
  return optimizer;
}

void StepObject(ContextOptimizer& optimizer, int64_t context, double learning_rate) {
  ContextPtr gradients;
  try {
    gradients = DistAutogradContainer::getInstance().retrieveContext(context);
  } catch (const c10::Error&) {
    return;  // no call of the context has come here: no gradient has either
  }
  optimizer.Step(gradients, learning_rate);
}

// The beginning of the arguments of each function here.
std::vector<c10::IValue> Arguments(const RemoteParameters& object, const OptimizerSpec& spec) {
  return {object.use->id(), spec.name, Value<std::vector<double>>::To(spec.options)};
}

std::shared_ptr<ContextOptimizer> OptimizerOf(internal::ObjectTable& objects,
                                              const Registry::Arguments& arguments) {
  return OptimizerOf(objects.Get(Value<int64_t>::From(arguments.at(0))),
                     {.name = Value<std::string>::From(arguments.at(1)),
                      .options = Value<std::vector<double>>::From(arguments.at(2))});
}

}  // namespace

OptimizerSpec sgd(double learning_rate, double momentum, double weight_decay) {
  return {.name = "sgd", .options = {learning_rate, momentum, weight_decay}};
}

OptimizerSpec adagrad(double learning_rate) {
  return {.name = "adagrad", .options = {learning_rate}};
}

OptimizerSpec adam(double learning_rate, double weight_decay) {
  return {.name = "adam", .options = {learning_rate, weight_decay}};
}

class DistributedOptimizer::Local : public ContextOptimizer {
 public:
  using ContextOptimizer::ContextOptimizer;
};

DistributedOptimizer::DistributedOptimizer(OptimizerSpec spec,
                                           std::vector<RemoteParameters> objects,
                                           std::vector<at::Tensor> local)
    : spec_(std::move(spec)),
      objects_(std::move(objects)),
      local_(local.empty() ? nullptr : std::make_unique<Local>(spec_, std::move(local))) {
  if (local_ == nullptr) Make(spec_, {at::empty({0})});  // refuses an unknown one
  set_learning_rate(spec_.options.at(0));
}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::set_learning_rate(double rate) {
  if (!std::isfinite(rate) || rate < 0) {
    throw ConfigurationError("the learning rate must be finite and not negative, not " +
                             std::to_string(rate));
  }
  learning_rate_ = rate;
}

void DistributedOptimizer::step(const AutogradContext& context) {
  const auto transport = internal::Transport::Get();
  std::vector<internal::Transport::FuturePtr> steps;
  for (const RemoteParameters& object : objects_) {
    std::vector<c10::IValue> arguments = Arguments(object, spec_);
    arguments.emplace_back(context.id());
    arguments.emplace_back(learning_rate_);
    steps.push_back(transport->Send(object.use->owner(), kStep, std::move(arguments)));
  }
  if (local_ != nullptr) {
    local_->Step(DistAutogradContainer::getInstance().retrieveContext(context.id()),
                 learning_rate_);
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    transport->Receive(*steps[i], objects_[i].use->owner(), kStep);
  }
}

std::vector<at::Tensor> DistributedOptimizer::state(const RemoteParameters& object) const {
  const auto transport = internal::Transport::Get();
  const int owner = object.use->owner();
  const auto answer = transport->Send(owner, kState, Arguments(object, spec_));
  return Value<Tensors>::From(transport->Receive(*answer, owner, kState));
}

void DistributedOptimizer::load_state(const RemoteParameters& object,
                                      const std::vector<at::Tensor>& state) const {
  const auto transport = internal::Transport::Get();
  const int owner = object.use->owner();
  std::vector<c10::IValue> arguments = Arguments(object, spec_);
  for (const at::Tensor& tensor : state) arguments.emplace_back(tensor.detach());
  const auto answer = transport->Send(owner, kLoadState, std::move(arguments));
  transport->Receive(*answer, owner, kLoadState);
}

DistributedOptimizer::Local& DistributedOptimizer::local() const {
  if (local_ == nullptr) throw ConfigurationError("the optimizer has no local parameters");
  return *local_;
}

std::vector<at::Tensor> DistributedOptimizer::local_state() const { return local().State(); }

void DistributedOptimizer::load_local_state(const std::vector<at::Tensor>& state) {
  local().LoadState(state);
}

namespace internal {

void AddOptimizerFunctions(Registry& registry) {
  using Arguments = Registry::Arguments;
  registry.Add(kStep, [](ObjectTable& objects, const Arguments& arguments) {
    StepObject(*OptimizerOf(objects, arguments), Value<int64_t>::From(arguments.at(3)),
               Value<double>::From(arguments.at(4)));
    return c10::IValue();
  });
  registry.Add(kState, [](ObjectTable& objects, const Arguments& arguments) {
    return Value<Tensors>::To(OptimizerOf(objects, arguments)->State());
  });
  registry.Add(kLoadState, [](ObjectTable& objects, const Arguments& arguments) {
    Tensors state;
    for (size_t i = 3; i < arguments.size(); ++i) {
      state.push_back(Value<at::Tensor>::From(arguments[i]));
    }
    OptimizerOf(objects, arguments)->LoadState(state);
    return c10::IValue();
  });
}

}  // namespace internal

}  // namespace ddp::rpc
