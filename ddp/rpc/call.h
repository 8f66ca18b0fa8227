#ifndef DDP_RPC_CALL_H_
#define DDP_RPC_CALL_H_

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/common/error.h"
#include "ddp/rpc/carried_uses.h"
#include "ddp/rpc/value.h"

namespace ddp::rpc {

namespace internal {

class ContextCalls;
class Transport;

// One call in progress. Thread-compatible.
class Call {
 public:
  struct Target {
    std::string worker;
    std::string function;
    std::chrono::milliseconds timeout{0};  // 0: that of init()
    std::shared_ptr<void> keep = nullptr;  // lives until the callee has answered
  };

  // Sends the call. In an autograd context with gradients enabled, the call is a part of the
  // context. Otherwise no gradient passes: arguments and answer are cut off from the graph.
  Call(Target target, std::vector<c10::IValue> arguments);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Blocks until the answer is there. Call it once, on the thread that goes on with the answer.
  c10::IValue Wait();
  bool completed() const { return future_->completed(); }
  const Target& target() const { return target_; }

 private:
  const Target target_;
  const std::shared_ptr<Transport> transport_;
  const int worker_;
  std::shared_ptr<ContextCalls> calls_;  // null: outside of a context
  size_t number_ = 0;                    // in calls_
  bool waited_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace internal

// The answer of a call, or its error. Movable. Dropping it abandons the answer; the callee runs the
// function all the same. Thread-compatible.
template <typename T>
class Future {
 public:
  explicit Future(std::unique_ptr<internal::Call> call) : call_(std::move(call)) {}

  // Blocks until the answer is there, and returns it. Call it once. Throws:
  // - RemoteError: the function threw, or there is no such function for these arguments;
  // - TimeoutError: no answer in time;
  // - PeerFailedError: a worker is gone or has failed, this one or another;
  // - CommunicationError: the message was not sent, or this worker has shut down meanwhile;
  // - ConfigurationError: called twice, or the answer is no T.
  // In an autograd context: call it before the backward, on the context's thread.
  T wait() {
    if (call_ == nullptr) throw ConfigurationError("wait() was called twice on one rpc::Future");
    const std::unique_ptr<internal::Call> call = std::move(call_);
    const c10::IValue value = call->Wait();
    internal::CarriedUses uses;
    uses.Read(value);
    try {
      return Value<T>::From(value);
    } catch (const ConfigurationError& error) {
      throw ConfigurationError("the result of " + call->target().function + " on worker " +
                               call->target().worker + ": " + error.what_without_backtrace());
    }
  }

  // Returns true when wait() would not block.
  bool completed() const { return call_ == nullptr || call_->completed(); }

 private:
  std::unique_ptr<internal::Call> call_;
};

namespace internal {

template <typename R, typename... A>
Future<R> Start(Call::Target target, A&&... arguments) {
  CarriedUses uses;
  std::vector<c10::IValue> values;
  values.reserve(sizeof...(A));
  (values.push_back(Value<std::decay_t<A>>::To(std::forward<A>(arguments))), ...);
  auto call = std::make_unique<Call>(std::move(target), std::move(values));
  uses.OnSent();
  return Future<R>(std::move(call));
}

// A text literal travels as a string.
template <typename T>
decltype(auto) AsValue(T&& argument) {
  if constexpr (std::is_convertible_v<T, const char*>) {
    return std::string(argument);
  } else {
    return std::forward<T>(argument);
  }
}

}  // namespace internal

// A worker by its name, with the time limit of one call; a name alone has that of init().
struct Callee {
  Callee(const char* worker) : name(worker) {}                      // NOLINT
  Callee(std::string worker, std::chrono::milliseconds limit = {})  // NOLINT
      : name(std::move(worker)), timeout(limit) {}
  std::string name;
  std::chrono::milliseconds timeout{0};
};

// Calls `function` of a worker, which may be this one, and returns at once. R: the result's type.
//
//   rpc::Future<at::Tensor> rows = rpc::async<at::Tensor>("ps0", "lookup", ids);
//
// The result and the arguments have types of Value (value.h); the callee checks the arguments.
// Throws ConfigurationError for an unknown worker and without init(). Thread: any.
template <typename R, typename... A>
Future<R> async(const Callee& callee, const std::string& function, A&&... arguments) {
  return internal::Start<R>(
      {.worker = callee.name, .function = function, .timeout = callee.timeout},
      internal::AsValue(std::forward<A>(arguments))...);
}

// The same, and waits: see Future::wait().
template <typename R, typename... A>
R sync(const Callee& callee, const std::string& function, A&&... arguments) {
  return async<R>(callee, function, std::forward<A>(arguments)...).wait();
}

}  // namespace ddp::rpc

#endif  // DDP_RPC_CALL_H_
