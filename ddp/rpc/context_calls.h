#ifndef DDP_RPC_CONTEXT_CALLS_H_
#define DDP_RPC_CONTEXT_CALLS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace ddp::rpc::internal {

// The calls of one distributed autograd context that this worker has made, and the rule that a
// backward through them must keep.
//
// Reason: LibTorch's engine waits for the gradient of every message of a context. A gradient that
// never comes is a wait until the timeout of the calls. So before a backward:
// - every call has ended well, and its answer was taken;
// - the loss depends on every answer that carries a gradient;
// - a call that sent a gradient-requiring tensor has such an answer.
//
// Free of LibTorch. Thread-safe.
class ContextCalls {
 public:
  // A node of autograd's graph.
  using Node = const void*;

  // Notes a call. `sends_gradient`: an argument requires a gradient. Returns the call's number.
  size_t Begin(std::string worker, std::string function, bool sends_gradient) {
    MutexLock lock(mutex_);
    calls_.push_back({.name = std::move(function) + " on worker " + std::move(worker),
                      .sends_gradient = sends_gradient});
    return calls_.size() - 1;
  }

  // The call has ended. `answer`: the node through which gradients leave for the callee; null: the
  // answer has none.
  void OnAnswer(size_t call, Node answer) {
    MutexLock lock(mutex_);
    calls_[call].state = State::kAnswered;
    calls_[call].answer = answer;
  }
  void OnFailure(size_t call, std::string reason) {
    MutexLock lock(mutex_);
    calls_[call].state = State::kFailed;
    calls_[call].reason = std::move(reason);
  }

  // Returns the first reason why a backward that reaches the nodes with `reaches` would wait in
  // vain; nullopt: there is none.
  std::optional<std::string> Problem(const std::function<bool(Node)>& reaches) const {
    MutexLock lock(mutex_);
    for (const Call& call : calls_) {
      if (call.state == State::kPending) {
        return "the answer of " + call.name +
               " was not taken: call wait() on its future before the backward";
      }
      if (call.state == State::kFailed) {
        return "the call of " + call.name + " failed in this context (" + call.reason +
               "): begin a new context, and repeat the forward in it";
      }
      if (call.answer == nullptr && call.sends_gradient) {
        return "the call of " + call.name +
               " sent a tensor that requires a gradient, and its answer carries none: send "
               "tensor.detach()";
      }
      if (call.answer != nullptr && !reaches(call.answer)) {
        return "the loss does not depend on the answer of " + call.name +
               ", which carries a gradient: use the answer, call under NoGradGuard, or call before "
               "the context begins";
      }
    }
    return std::nullopt;
  }

  // Only the context's own backward may pass the answers of its calls: for the calls of an
  // AutogradContext. A plain backward would run into an assertion of LibTorch.
  void GuardAnswers() { guarded_ = true; }
  bool guarded() const { return guarded_; }

  // The context's own backward runs while this object lives.
  class Backward {
   public:
    explicit Backward(ContextCalls& calls) : calls_(calls) { calls_.in_backward_ = true; }
    ~Backward() { calls_.in_backward_ = false; }
    Backward(const Backward&) = delete;
    Backward& operator=(const Backward&) = delete;

   private:
    ContextCalls& calls_;
  };
  bool in_backward() const { return in_backward_; }

  // Returns the calls of the context that is open on this thread; null: none is.
  static const std::shared_ptr<ContextCalls>& current() { return Current(); }

  // Sets current() of this thread while it lives.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<ContextCalls> calls)
        : before_(std::exchange(Current(), std::move(calls))) {}
    ~Scope() { Current() = std::move(before_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<ContextCalls> before_;
  };

 private:
  enum class State { kPending, kAnswered, kFailed };
  struct Call {
    std::string name;
    bool sends_gradient = false;
    State state = State::kPending;
    Node answer = nullptr;
    std::string reason = "";
  };

  static std::shared_ptr<ContextCalls>& Current() {
    static thread_local std::shared_ptr<ContextCalls> current;
    return current;
  }

  std::atomic<bool> guarded_ = false;
  std::atomic<bool> in_backward_ = false;
  mutable Mutex mutex_;
  std::vector<Call> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_CONTEXT_CALLS_H_
