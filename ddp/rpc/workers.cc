#include "ddp/rpc/workers.h"

#include <chrono>
#include <exception>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/rpc_place.h"
#include "ddp/rpc/call.h"
#include "ddp/rpc/context_backward.h"
#include "ddp/rpc/context_calls.h"
#include "ddp/rpc/distributed_optimizer.h"
#include "ddp/rpc/message_fault.h"
#include "ddp/rpc/remote.h"
#include "ddp/rpc/transport.h"

namespace ddp::rpc {
namespace {

// A server may wait for its trainers that long.
constexpr std::chrono::hours kBarrierTimeout{24};

}  // namespace

// ---- Calls and objects.

namespace internal {
namespace {

bool RequiresGradient(const std::vector<c10::IValue>& values) {
  bool result = false;
  for (const c10::IValue& value : values) {
    ForEachTensor(value, [&](const at::Tensor& tensor) { result |= tensor.requires_grad(); });
  }
  return result;
}

// Returns `value` with every tensor cut off from the graph.
c10::IValue Detach(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.requires_grad() ? tensor.detach() : tensor;
  }
  if (!value.isTuple()) return value;
  std::vector<c10::IValue> parts;
  for (const c10::IValue& part : value.toTupleRef().elements()) parts.push_back(Detach(part));
  return c10::ivalue::Tuple::create(std::move(parts));
}

// Stops a plain backward before it comes to the answer of a call in an AutogradContext.
class AnswerGuard final : public torch::autograd::FunctionPreHook {
 public:
  AnswerGuard(std::shared_ptr<const ContextCalls> calls, std::string name)
      : calls_(std::move(calls)), name_(std::move(name)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (calls_->in_backward()) return gradients;
    throw ConfigurationError("loss.backward() came to the answer of " + name_ +
                             ", a call in an rpc::AutogradContext: call context.backward(loss)");
  }

 private:
  const std::shared_ptr<const ContextCalls> calls_;
  const std::string name_;
};

}  // namespace

Call::Call(Target target, std::vector<c10::IValue> arguments)
    : target_(std::move(target)),
      transport_(Transport::Get()),
      worker_(transport_->IdOf(target_.worker)) {
  const size_t first = target_.keep != nullptr ? 1 : 0;  // a method's call begins with the object
  for (size_t i = first; i < arguments.size(); ++i) {
    Transport::CheckTensors(arguments[i], [&] {
      return "argument " + std::to_string(i - first + 1) + " of " + target_.function +
             " on worker " + target_.worker;
    });
  }
  if (at::GradMode::is_enabled()) calls_ = ContextCalls::current();
  if (calls_ != nullptr) {
    number_ = calls_->Begin(target_.worker, target_.function, RequiresGradient(arguments));
  } else if (RequiresGradient(arguments)) {
    for (c10::IValue& argument : arguments) argument = Detach(argument);
  }
  future_ = transport_->Send(worker_, target_.function, std::move(arguments), target_.timeout,
                             /*record=*/calls_ != nullptr);
  if (target_.keep != nullptr) {
    future_->addCallback([keep = target_.keep](c10::ivalue::Future&) {});
  }
}

Call::~Call() {
  if (!waited_ && calls_ == nullptr) transport_->Drop(*future_);
}

c10::IValue Call::Wait() {
  waited_ = true;
  if (calls_ == nullptr) return Detach(transport_->Receive(*future_, worker_, target_.function));
  try {
    c10::IValue value = transport_->Receive(*future_, worker_, target_.function);
    torch::autograd::Node* answer = nullptr;
    ForEachTensor(value, [&](const at::Tensor& tensor) {
      if (answer == nullptr && tensor.requires_grad()) answer = tensor.grad_fn().get();
    });
    if (answer != nullptr && calls_->guarded()) {
      answer->add_pre_hook(
          std::make_unique<AnswerGuard>(calls_, target_.function + " on worker " + target_.worker));
    }
    calls_->OnAnswer(number_, answer);
    return value;
  } catch (const std::exception& error) {
    calls_->OnFailure(number_, ddp::internal::MessageOf(error));
    throw;
  }
}

void ObjectUse::AddUser() const {
  const std::shared_ptr<Transport> transport = Transport::Get();
  if (transport->id() == owner_) return transport->objects().AddUser(id_);
  constexpr char kFunction[] = "ddp.rpc.add_user";
  const auto added = transport->Send(owner_, kFunction, {c10::IValue(id_)});
  transport->Receive(*added, owner_, kFunction);
}

}  // namespace internal

// ---- This process.

using ddp::internal::OwnRpcPlace;
using ddp::internal::RpcPlace;

Workers::Workers(std::shared_ptr<internal::Transport> transport)
    : transport_(std::move(transport)),
      name_(this->transport()->name()),
      id_(this->transport()->id()),
      names_(this->transport()->names()),
      exceptions_at_start_(std::uncaught_exceptions()) {}

Workers::~Workers() {
  if (transport() == nullptr) return;
  report_failure(std::uncaught_exceptions() > exceptions_at_start_
                     ? "an exception ended its program"
                     : "it has left without shutdown()");
  internal::Transport::Set(nullptr);
  try {
    TakeTransport()->Stop(/*together=*/false);
  } catch (const std::exception& error) {
    LOG(WARNING) << "the connections to other workers could not be ended: " << error.what();
  }
}

std::shared_ptr<internal::Transport> Workers::transport() const {
  const MutexLock lock(mutex_);
  return transport_;
}

std::shared_ptr<internal::Transport> Workers::TakeTransport() {
  const MutexLock lock(mutex_);
  return std::exchange(transport_, nullptr);
}

int Workers::id() const { return id_; }
const std::string& Workers::name() const { return name_; }
const std::vector<std::string>& Workers::names() const { return names_; }

void Workers::barrier() {
  const auto transport = this->transport();
  if (transport == nullptr) throw ConfigurationError("barrier() after shutdown()");
  const OwnRpcPlace::Waiting waiting(RpcPlace::Meeting::kBarrier);
  transport->Barrier(internal::Meeting::kBarrier, kBarrierTimeout);
}

void Workers::shutdown() {
  const auto transport = this->transport();
  if (transport == nullptr) throw ConfigurationError("shutdown() was called twice");
  {
    const OwnRpcPlace::Waiting waiting(RpcPlace::Meeting::kShutdown);
    transport->Barrier(internal::Meeting::kShutdown, kBarrierTimeout);
  }
  internal::Transport::Set(nullptr);  // no release of an RRef is sent from now on
  TakeTransport();
  try {
    transport->Stop(/*together=*/true);
  } catch (...) {
    transport->Stop(/*together=*/false);  // here: report_failure() may hold the object a bit longer
    throw;
  }
}

void Workers::report_failure(const std::string& reason) {
  if (const auto transport = this->transport()) transport->ReportFailure(reason);
}

std::unique_ptr<Workers> init(std::string name, const c10::intrusive_ptr<c10d::Store>& store,
                              Options options) {
  return internal::InitWithFault(std::move(name), store, std::move(options), /*fault=*/nullptr);
}

std::unique_ptr<Workers> internal::InitWithFault(std::string name,
                                                 const c10::intrusive_ptr<c10d::Store>& store,
                                                 Options options,
                                                 std::shared_ptr<MessageFault> fault) {
  const std::chrono::milliseconds timeout = options.timeout;
  AddOptimizerFunctions(options.registry);
  auto transport = std::make_shared<Transport>(std::move(name), store, std::move(options), fault);
  Transport::Set(transport);
  ContextBackward::Install();
  auto workers = std::make_unique<Workers>(transport);
  // From here on every worker can answer.
  transport->Barrier(Meeting::kInit, timeout);
  transport->WatchOthers();
  return workers;
}

}  // namespace ddp::rpc
