#include "ddp/rpc/distributed_optimizer.h"

#include <cstdint>
#include <tuple>

#include <ATen/ops/empty.h>
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

constexpr char kStep[] = "ddp.rpc.optimizer_step";

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

// One optimizer, with the gradients of a context in place of `.grad`.
class ContextOptimizer {
 public:
  ContextOptimizer(OptimizerSpec spec, std::vector<at::Tensor> parameters)
      : spec_(std::move(spec)), parameters_(parameters), optimizer_(Make(spec_, parameters)) {}

  const OptimizerSpec& spec() const { return spec_; }

  void Step(const ContextPtr& context) {
    const MutexLock lock(mutex_);
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

 private:
  const OptimizerSpec spec_;
  Mutex mutex_;
  std::vector<at::Tensor> parameters_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Makes a step of an object of this worker. Its optimizer is made at the first step.
void StepObject(const internal::RemoteObject& object, int64_t context, const OptimizerSpec& spec) {
  if (object.parameters == nullptr) {
    throw ConfigurationError("the class " + object.class_name + " has no parameters()");
  }
  const auto optimizer = object.attachment->Get<ContextOptimizer>(
      [&] { return std::make_shared<ContextOptimizer>(spec, object.parameters()); });
  if (optimizer->spec() != spec) {
    throw ConfigurationError("the object has an optimizer \"" + optimizer->spec().name +
                             "\" with other options: give one spec on all workers");
  }
  ContextPtr gradients;
  try {
    gradients = DistAutogradContainer::getInstance().retrieveContext(context);
  } catch (const c10::Error&) {
    return;  // no call of the context has come here: no gradient has either
  }
  optimizer->Step(gradients);
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
}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::step(const AutogradContext& context) {
  const auto transport = internal::Transport::Get();
  std::vector<internal::Transport::FuturePtr> steps;
  for (const RemoteParameters& object : objects_) {
    std::vector<c10::IValue> arguments = {object.use->id(), context.id(), spec_.name,
                                          Value<std::vector<double>>::To(spec_.options)};
    steps.push_back(transport->Send(object.use->owner(), kStep, std::move(arguments)));
  }
  if (local_ != nullptr) {
    local_->Step(DistAutogradContainer::getInstance().retrieveContext(context.id()));
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    transport->Receive(*steps[i], objects_[i].use->owner(), kStep);
  }
}

namespace internal {

void AddOptimizerFunctions(Registry& registry) {
  registry.Add(kStep, [](ObjectTable& objects, const Registry::Arguments& arguments) {
    const int64_t id = Value<int64_t>::From(arguments.at(0));
    const OptimizerSpec spec{.name = Value<std::string>::From(arguments.at(2)),
                             .options = Value<std::vector<double>>::From(arguments.at(3))};
    StepObject(objects.Get(id), Value<int64_t>::From(arguments.at(1)), spec);
    return c10::IValue();
  });
}

}  // namespace internal

}  // namespace ddp::rpc
