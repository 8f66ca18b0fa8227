#include "ddp/rpc/transport.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/testing/faulty_tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/broken_pipes.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/rpc_place.h"
#include "ddp/health/group_failure.h"
#include "ddp/rpc/carried_uses.h"
#include "ddp/rpc/context_calls.h"
#include "ddp/rpc/ending_agent.h"
#include "ddp/rpc/error.h"
#include "ddp/rpc/failure/engine_error.h"
#include "ddp/rpc/first_meeting.h"
#include "ddp/rpc/graph_walk.h"
#include "ddp/rpc/meeting_point.h"
#include "ddp/rpc/own_transports.h"
#include "ddp/rpc/request_callback.h"

namespace ddp::rpc::internal {

namespace libtorch = torch::distributed::rpc;
using ddp::internal::FailureMonitor;
using ddp::internal::GroupFailure;
using ddp::internal::MessageOf;
using ddp::internal::OwnRpcPlace;
using torch::distributed::autograd::DistAutogradContainer;

namespace {

// The start of LibTorch's text for a call without an answer (kRpcTimeoutErrorStr).
constexpr char kTimeout[] = "RPC ran for more than set timeout";

// Returns the node through which the gradients of a call's arguments return; null: there are none.
// A message has one for all of its tensors.
const GraphWalk::Node* NodeOf(const std::vector<c10::IValue>& arguments) {
  const GraphWalk::Node* node = nullptr;
  for (const c10::IValue& argument : arguments) {
    ForEachTensor(argument, [&](const at::Tensor& tensor) {
      if (node == nullptr && tensor.requires_grad()) node = tensor.grad_fn().get();
    });
  }
  return node;
}

float Seconds(std::chrono::milliseconds time) { return std::chrono::duration<float>(time).count(); }

std::shared_ptr<Transport>& Current() {
  static std::shared_ptr<Transport> current;
  return current;
}

std::atomic<bool> has_begun{false};

}  // namespace

Transport::Transport(std::string name, const c10::intrusive_ptr<c10d::Store>& store,
                     Options options, const std::shared_ptr<MessageFault>& fault)
    : name_(std::move(name)), options_(std::move(options)) {
  if (name_.empty() || name_.size() > libtorch::WorkerInfo::MAX_NAME_LEN || !store ||
      options_.rank < 0 || options_.rank >= options_.world_size || options_.world_size > 32767 ||
      options_.threads < 1 || options_.timeout.count() <= 0) {
    throw ConfigurationError(absl::StrCat(
        "rpc::init needs a name of 1 to ", libtorch::WorkerInfo::MAX_NAME_LEN,
        " characters, a store, 0 <= rank < world_size, a thread and a timeout; got worker \"",
        name_, "\" with rank ", options_.rank, " of ", options_.world_size));
  }
  if (has_begun.exchange(true)) {
    throw ConfigurationError(
        "rpc::init can be called once in a process: parts of LibTorch keep the first agent for "
        "ever. Start a new process, as ddprun does in every generation");
  }
  AddOwnFunctions();
  sends_ = std::make_shared<PendingSends>(&Translate);
  const auto prefixed = [&](const char* prefix) -> c10::intrusive_ptr<c10d::Store> {
    return c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("rpc/", prefix), store->clone());
  };
  try {
    Meet(prefixed("first/"));
    const auto own = prefixed("agent/");
    own->setTimeout(options_.timeout);
    agent_ = MakeAgent(own, fault);
    for (const libtorch::WorkerInfo& info : agent_->getWorkerInfos()) {
      names_.resize(std::max<size_t>(names_.size(), info.id_ + 1));
      names_[info.id_] = info.name_;
    }
    MakeMonitor(ddp::internal::MakeGroupStore(prefixed("reports/")));
  } catch (const ConfigurationError&) {
    throw;
  } catch (const std::exception& error) {
    Stop(/*together=*/false);
    throw CommunicationError(absl::StrCat("worker ", name_, " could not connect to the ",
                                          options_.world_size, " workers: ", MessageOf(error)));
  }
}

// LibTorch's agent would wait for a worker that does not come until the timeout, without a name.
void Transport::Meet(const c10::intrusive_ptr<c10d::Store>& store) {
  const FirstMeeting meeting = MeetFirst(ddp::internal::MakeGroupStore(store), name_, membership(),
                                         absl::Milliseconds(options_.timeout.count()));
  if (!meeting.mismatch.empty()) throw ConfigurationError("rpc::init: " + meeting.mismatch);
  if (!meeting.late.empty()) {
    throw std::runtime_error(absl::StrCat("ranks ", meeting.late, " did not come in time"));
  }
  OwnRpcPlace::SetWorld(meeting.world);
}

void Transport::MakeMonitor(std::shared_ptr<ddp::internal::GroupStore> store) {
  FailureMonitor::Options options{.command_timeout = absl::Seconds(5)};
  options.on_failure = [sends = sends_](const GroupFailure& failure) {
    sends->End(std::make_exception_ptr(WorkerFailed(failure.rank, failure.reason)));
  };
  monitor_ = std::make_shared<FailureMonitor>(std::move(store), membership(), std::move(options));
  // Nobody may wait for the message that shows the loss.
  sends_->OnLost([names = names_,
                  weak = std::weak_ptr<FailureMonitor>(monitor_)](const PendingSends::Lost& lost) {
    const auto monitor = weak.lock();
    if (monitor == nullptr) return;
    const GroupFailure found{.rank = lost.worker,
                             .reason = LostWorkerText(names.at(lost.worker), lost.text)};
    // While an exception unwinds this thread, another thread writes the report.
    monitor->log().writes().Run([found, to = monitor.get()] { to->ReportFound(found); });
  });
}

std::shared_ptr<libtorch::RpcAgent> Transport::MakeAgent(
    const c10::intrusive_ptr<c10d::Store>& store, const std::shared_ptr<MessageFault>& fault) {
  IgnoreBrokenPipes();
  DistAutogradContainer::init(options_.rank);
  const auto callback = [this] { return std::make_unique<RequestCallback>(this); };
  const auto id = static_cast<libtorch::worker_id_t>(options_.rank);
  const float timeout = Seconds(options_.timeout);
  std::shared_ptr<libtorch::RpcAgent> agent;
  if (options_.faults.any()) {
    std::unordered_map<std::string, float> delays(options_.faults.delay_seconds.begin(),
                                                  options_.faults.delay_seconds.end());
    // LibTorch's options with faults leave no choice of transports.
    agent = std::make_shared<EndingAgent<libtorch::FaultyTensorPipeAgent>>(
        sends_, fault, store, name_, id, options_.world_size,
        libtorch::FaultyTensorPipeRpcBackendOptions(options_.threads, timeout, "",
                                                    options_.faults.lost, std::move(delays),
                                                    options_.faults.losses),
        std::unordered_map<std::string, libtorch::DeviceMap>{}, std::vector<c10::Device>{},
        callback());
  } else {
    agent = std::make_shared<EndingAgent<libtorch::TensorPipeAgent>>(
        sends_, fault, store, name_, id, options_.world_size,
        libtorch::TensorPipeRpcBackendOptions(options_.threads, OwnTransports(options_.world_size),
                                              std::nullopt, timeout, ""),
        std::unordered_map<std::string, libtorch::DeviceMap>{}, std::vector<c10::Device>{},
        callback());
  }
  libtorch::RpcAgent::setCurrentRpcAgent(agent);
  // Without a resolver LibTorch refuses every message. Its own parts need types of dictionaries.
  agent->setTypeResolver(
      std::make_shared<libtorch::TypeResolver>([](const c10::QualifiedName& name) {
        const std::string& text = name.qualifiedName();
        return c10::StrongTypePtr(nullptr, torch::jit::ScriptTypeParser().parseType(text));
      }));
  agent->start();
  return agent;
}

void Transport::AddOwnFunctions() {
  options_.registry.Add("ddp.rpc.add_user",
                        [](ObjectTable& objects, const Registry::Arguments& arguments) {
                          objects.AddUser(arguments.at(0).toInt());
                          return c10::IValue();
                        });
  options_.registry.Add("ddp.rpc.release",
                        [](ObjectTable& objects, const Registry::Arguments& arguments) {
                          objects.Release(arguments.at(0).toInt());
                          return c10::IValue();
                        });
}

Transport::~Transport() {
  try {
    Stop(/*together=*/false);
  } catch (const std::exception& error) {
    LOG(WARNING) << "worker " << name_ << " could not end its connections: " << MessageOf(error);
  }
}

std::shared_ptr<Transport> Transport::Find() { return std::atomic_load(&Current()); }

std::shared_ptr<Transport> Transport::Get() {
  std::shared_ptr<Transport> transport = Find();
  if (transport == nullptr) {
    throw ConfigurationError(has_begun
                                 ? "this worker has shut down, or its rpc::init() has failed: no "
                                   "call is possible any more in this process"
                                 : "this process is no worker: call rpc::init() first");
  }
  return transport;
}

void Transport::Set(std::shared_ptr<Transport> transport) {
  std::atomic_store(&Current(), std::move(transport));
}

int Transport::IdOf(const std::string& worker) const {
  const auto found = std::find(names_.begin(), names_.end(), worker);
  if (found != names_.end()) return static_cast<int>(found - names_.begin());
  throw ConfigurationError(absl::StrCat("there is no worker \"", worker, "\"; the workers are ",
                                        absl::StrJoin(names_, ", ")));
}

const std::string& Transport::NameOf(int id) const {
  if (id >= 0 && id < static_cast<int>(names_.size())) return names_[id];
  throw ConfigurationError(absl::StrCat("there is no worker ", id));
}

// ---- Calls of this worker.

void Transport::CheckTensors(const c10::IValue& value, const std::function<std::string()>& name) {
  ForEachTensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      throw ConfigurationError(absl::StrCat(
          name(), " has an undefined tensor: send a std::optional<at::Tensor> without a value"));
    }
    if (tensor.device().is_cpu()) return;
    throw ConfigurationError(absl::StrCat(name(), " has a tensor on the device ",
                                          tensor.device().str(),
                                          ": only tensors on the CPU travel; send tensor.cpu()"));
  });
}

Transport::FuturePtr Transport::Send(int worker, const std::string& function,
                                     std::vector<c10::IValue> arguments,
                                     std::chrono::milliseconds timeout, bool record) {
  if (agent_ == nullptr) throw ConfigurationError("this worker has shut down");
  Registry::CheckName(function);
  auto message = CallMessage(function, std::move(arguments));
  float seconds = timeout.count() > 0 ? Seconds(timeout) : libtorch::kUnsetRpcTimeout;
  if (timeout == kNoLimit) seconds = 0;  // LibTorch's way to say so
  const libtorch::WorkerInfo& to =
      agent_->getWorkerInfo(static_cast<libtorch::worker_id_t>(worker));
  if (!record) return agent_->send(to, std::move(message), seconds);
  // With force: an answer may carry a gradient although no argument does.
  return torch::distributed::autograd::sendMessageWithAutograd(*agent_, to, std::move(message),
                                                               /*forceGradRecording=*/true, seconds,
                                                               /*forceDisableProfiling=*/true);
}

c10::IValue Transport::Receive(Future& future, int worker, const std::string& function) {
  future.wait();
  if (future.hasError()) Throw(future.exception_ptr(), worker, function);
  c10::IValue answer;
  try {
    answer =
        libtorch::deserializeRespToIValue(*future.constValue().toCustomClass<libtorch::Message>());
  } catch (...) {
    Throw(std::current_exception(), worker, function);
  }
  const auto& parts = Elements("an answer", answer);
  if (parts.size() < 2 || !parts[0].isBool()) {
    throw CommunicationError(absl::StrCat(function, ": worker ", NameOf(worker),
                                          " runs another version of this library"));
  }
  if (!parts[0].toBool()) ThrowAnswer(answer, NameOf(worker), function);
  return parts[1];
}

void Transport::Drop(Future& future) {
  future.addCallback([](Future& answer) {
    if (answer.hasError()) return;
    CarriedUses uses;
    uses.Read(
        libtorch::deserializeRespToIValue(*answer.constValue().toCustomClass<libtorch::Message>()));
  });
}

void ReleaseUse(int owner, int64_t id) {
  const std::shared_ptr<Transport> transport = Transport::Find();
  if (transport == nullptr) return;
  try {
    if (transport->id() == owner) {
      transport->objects().Release(id);
    } else {
      transport->Send(owner, "ddp.rpc.release", {c10::IValue(id)});
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << "an RRef could not be released: " << error.what();
  }
}

void Transport::ThrowAnswer(const c10::IValue& answer, const std::string& worker,
                            const std::string& function) {
  const auto [returned, failed, message, stack] =
      Value<std::tuple<bool, int, std::string, std::string>>::From(answer);
  if (failed < 0) throw RemoteError(worker, function, message, stack);
  // The callee waited for a worker that is gone.
  ThrowFound({.rank = failed, .reason = message});
}

namespace {

std::exception_ptr ErrorOf(const EngineError& error) {
  return std::make_exception_ptr(std::runtime_error(error.Serialize()));
}

}  // namespace

// Runs on a thread of the agent, for every message that failed.
std::exception_ptr Transport::Translate(const PendingSends::Receiver& receiver, Future& failed,
                                        std::optional<PendingSends::Lost>* lost) {
  const std::string text = failed.tryRetrieveErrorMessage();
  switch (libtorch::getRPCErrorType(failed)) {
    case libtorch::RPCErrorType::TIMEOUT:
      // A backward's error has no other sign of the worker.
      return ErrorOf(
          {.message = absl::StrCat("no answer in time from worker ", receiver.name, ": ",
                                   text.substr(std::min(text.size(), text.find(kTimeout)))),
           .timeout = true});
    case libtorch::RPCErrorType::INTENTIONAL_FAILURE:
      break;
    case libtorch::RPCErrorType::UNKNOWN_ERROR:
      if (text.starts_with(kErrorOnNode)) break;  // of the callee, which is alive
      *lost = {.worker = receiver.worker, .text = text};
      // The engine passes the error on to a worker that may not have found the loss itself.
      return ErrorOf({.message = LostWorkerText(receiver.name, text), .lost = receiver.worker});
  }
  return failed.exception_ptr();
}

void Transport::ThrowFound(const GroupFailure& found) {
  monitor_->ReportFound(found);
  ThrowFailure(*monitor_->failure());
}

void Transport::ThrowFailure(const GroupFailure& failure) const {
  throw WorkerFailed(failure.rank, failure.reason);
}

void Transport::Throw(const std::exception_ptr& error, int worker, const std::string& function) {
  const std::string callee = worker >= 0 ? NameOf(worker) : "";
  const std::string what =
      callee.empty() ? function : absl::StrCat(function, " on worker ", callee);
  try {
    std::rethrow_exception(error);
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& other) {
    if (const auto failure = monitor_->failure()) ThrowFailure(*failure);
    if (const auto lost = sends_->lost()) {
      ThrowFound(
          {.rank = lost->worker, .reason = LostWorkerText(NameOf(lost->worker), lost->text)});
    }
    const EngineError cause = EngineError::Parse(MessageOf(other));
    if (cause.worker < 0) {
      const std::string message = absl::StrCat(what, ": ", cause.message);
      if (cause.timeout) throw TimeoutError(message);
      throw CommunicationError(message);
    }
    const std::string line = cause.message.substr(0, cause.message.find('\n'));
    if (cause.lost.has_value()) ThrowFound({.rank = *cause.lost, .reason = line});
    const bool known = cause.worker < static_cast<int>(names_.size());
    const std::string& at = known ? names_[cause.worker] : callee;
    if (!cause.timeout) throw RemoteError(at, function, line, other.what());
    // That worker, which may be this one, waited for another one.
    const std::string place = cause.worker == id() ? "" : absl::StrCat(" on worker ", at);
    throw TimeoutError(absl::StrCat(function, place, ": ", line));
  }
}

// ---- Calls of other workers.

c10::IValue Transport::Answer(const std::string& function,
                              const std::vector<c10::IValue>& arguments) {
  const auto failed = [](int rank, const std::exception& error) {
    return Failed(rank, MessageOf(error), error.what());
  };
  try {
    const auto calls = DistAutogradContainer::getInstance().hasValidContext()
                           ? std::make_shared<ContextCalls>()
                           : nullptr;
    const ContextCalls::Scope scope(calls);
    const GraphWalk::Node* const received = calls == nullptr ? nullptr : NodeOf(arguments);
    CarriedUses received_uses;
    for (const c10::IValue& argument : arguments) received_uses.Read(argument);
    CarriedUses sent_uses;
    c10::IValue value = options_.registry.Find(function)(objects_, arguments);
    CheckTensors(value, [] { return "the result"; });
    if (calls != nullptr) {
      GraphWalk walk;
      ForEachTensor(value, [&](const at::Tensor& tensor) { walk.AddRoot(tensor); });
      const bool carries_gradient = !walk.nodes().empty();
      // The gradients of what the function has sent come back from other workers.
      const auto context = DistAutogradContainer::getInstance().currentContext();
      for (const auto& [number, node] : context->sendFunctions()) walk.AddRoot(node.get());
      const auto problem = calls->Problem([&](const void* node) { return walk.Reaches(node); });
      if (problem.has_value()) {
        throw ConfigurationError(
            absl::StrCat("within ", function, ", \"the loss\" being its ", "result: ", *problem));
      }
      // LibTorch's engine on the caller would wait for the gradient of the arguments for ever.
      if (received != nullptr && carries_gradient && !walk.Reaches(received)) {
        throw ConfigurationError(
            "the result requires a gradient, and does not depend on the argument that requires "
            "one: send tensor.detach()");
      }
    }
    sent_uses.OnSent();
    return Returned(std::move(value));
  } catch (const WorkerFailed& error) {
    return failed(error.rank(), error);
  } catch (const std::exception& error) {
    return failed(-1, error);
  } catch (...) {
    return failed(-1, std::runtime_error("an exception that is no std::exception"));
  }
}

Transport::FuturePtr Transport::Arrive(const std::vector<c10::IValue>& arguments) {
  const auto meeting = static_cast<Meeting>(arguments.at(0).toInt());
  return meeting_point_.Arrive(meeting, arguments.at(1).toStringRef(), size());
}

// ---- Life.

void Transport::WatchOthers() {
  const int last = id() == 0 ? size() - 1 : 0;
  for (int worker = id() == 0 ? 1 : 0; worker <= last; ++worker) {
    for (int losses = 0; losses <= options_.faults.losses; ++losses) {
      const FuturePtr end = Send(worker, kWatch, {}, kNoLimit);
      if (!end->completed() || !end->hasError()) break;  // the faults are for the program
    }
  }
}

void Transport::Barrier(Meeting meeting, std::chrono::milliseconds timeout) {
  const int64_t number = static_cast<int>(meeting);
  for (int losses = 0;; ++losses) {
    const FuturePtr arrived =
        Send(/*worker=*/0, kBarrier, {c10::IValue(number), c10::IValue(name_)}, timeout);
    arrived->wait();
    const bool lost = arrived->hasError() && libtorch::getRPCErrorType(*arrived) ==
                                                 libtorch::RPCErrorType::INTENTIONAL_FAILURE;
    if (lost && losses < options_.faults.losses) continue;  // the faults are for the program
    try {
      Receive(*arrived, /*worker=*/0, "the barrier of all workers");
    } catch (const RemoteError& error) {
      // This worker cannot come to the meeting any more. The report may be faster than the answers
      // to the others.
      ReportFailure(error.message());
      throw ConfigurationError(error.message());
    }
    return;
  }
}

void Transport::ReportFailure(const std::string& reason) {
  monitor_->Report(absl::StrCat("worker ", name_, " failed: ", reason));
}

void Transport::Stop(bool together) {
  if (agent_ == nullptr) return;
  if (together) {
    Barrier(Meeting::kEnd, options_.timeout);
    meeting_point_.EndWatches();
    try {
      agent_->join(/*shutdown=*/true);  // waits for the others by the store
    } catch (const std::exception& error) {
      if (const auto failure = monitor_->failure()) ThrowFailure(*failure);
      throw TimeoutError(absl::StrCat("worker ", name_, ": another worker did not come to the end ",
                                      "of shutdown(): ", MessageOf(error)));
    }
  } else {
    sends_->End(std::make_exception_ptr(CommunicationError("this worker shuts down")));
  }
  agent_->shutdown();
  libtorch::RRefContext::destroyInstance(/*ignoreRRefLeak=*/true);
  libtorch::RpcAgent::setCurrentRpcAgent(nullptr);
  agent_.reset();
}

}  // namespace ddp::rpc::internal
