#ifndef DDP_REDUCER_BUCKETS_GRADIENT_CONTEXT_H_
#define DDP_REDUCER_BUCKETS_GRADIENT_CONTEXT_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace ddp::internal {

// Where the hooks of a backward post their work. See GradientContext.
class GradientEvents {
 public:
  // Adds an event. `accumulator`: of the leaf whose gradient has come with it, or null. Thread:
  // any.
  virtual void Post(std::function<void()> event,
                    const torch::autograd::Node* accumulator = nullptr) = 0;

 protected:
  ~GradientEvents() = default;
};

// A backward that keeps its gradients in another place than the parameters' `.grad`: the backward
// of a distributed autograd context (ddp/rpc). In a plain backward there is no GradientContext, and
// gradients are in `.grad`.
//
// The engine of such a backward runs autograd's hooks on threads of LibTorch's inter-op pool. These
// threads must not block: workers that serve each other's graphs would deadlock. So a hook of the
// library posts its work as an event. The thread that called backward runs the events in order,
// while the engine works. The reducer therefore never runs on a pool thread.
//
// The rule of a hook:    if (const auto events = GradientContext::OfHook()) events->Post(work);
// The rule of the work:  gradients by GradientOf() and SetGradientOf(), the end by AtBackwardEnd().
class GradientContext {
 public:
  GradientContext() = default;
  GradientContext(const GradientContext&) = delete;
  GradientContext& operator=(const GradientContext&) = delete;

  // ---- For events, and for functions of AtEnd().

  // Runs `function` when the engine has ended well. After a failure, destroys it without a call.
  virtual void AtEnd(std::function<void()> function) = 0;

  // Returns the gradient of a leaf in this context; undefined: none yet, in the order of events.
  virtual at::Tensor Gradient(const at::Tensor& leaf) = 0;
  virtual void SetGradient(const at::Tensor& leaf, at::Tensor gradient) = 0;

  // Returns a number that no other backward of this process has, and that is not negative.
  virtual int task() const = 0;
  // Returns the text of the exception that has ended the backward; empty: none has.
  virtual std::string failure() const { return std::string(); }

  // Returns the nodes that this backward reaches on this worker, also through other workers.
  virtual const std::vector<const torch::autograd::Node*>& nodes() const = 0;
  virtual bool Reaches(const torch::autograd::Node* node) const = 0;

  // ---- Which context.

  // Call it in a hook of autograd: returns the events of the hook's backward, or null. Costs one
  // atomic load while no GradientContext exists. Throws ConfigurationError in a backward of another
  // worker. Thread: any. The events may outlive the backward.
  static std::shared_ptr<GradientEvents> OfHook() {
    const Finder find = finder_.load(std::memory_order_relaxed);
    return find == nullptr ? nullptr : find();
  }
  // Returns true when a backward may have a GradientContext.
  static bool possible() { return finder_.load(std::memory_order_relaxed) != nullptr; }

  // Returns the context whose event this thread runs, or null. Costs one thread-local read.
  static GradientContext* running() { return running_; }

  // Sets running() of this thread while it lives.
  class Running {
   public:
    explicit Running(GradientContext* context) : before_(std::exchange(running_, context)) {}
    ~Running() { running_ = before_; }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    GradientContext* const before_;
  };

  // Sets the function behind OfHook(); null: none.
  using Finder = std::shared_ptr<GradientEvents> (*)();
  static void SetFinder(Finder finder) { finder_.store(finder, std::memory_order_relaxed); }

  // A context whose backward has failed calls this function before it destroys the functions of
  // AtEnd(), as the running context: a reducer that has seen no event may have peers that wait.
  using FailureHandler = void (*)();
  static void SetFailureHandler(FailureHandler handler) { failure_handler_ = handler; }

 protected:
  ~GradientContext() = default;

  static void CallFailureHandler() {
    if (const FailureHandler handler = failure_handler_) handler();
  }

 private:
  inline static constinit thread_local GradientContext* running_ = nullptr;
  inline static std::atomic<Finder> finder_{nullptr};
  inline static std::atomic<FailureHandler> failure_handler_{nullptr};
};

// Returns the gradient of a leaf: in the running context, or `.grad`. In a context, the reference
// is valid until the next call on this thread.
inline const at::Tensor& GradientOf(const at::Tensor& leaf) {
  GradientContext* const context = GradientContext::running();
  if (context == nullptr) return leaf.grad();
  static thread_local at::Tensor gradient;
  gradient = context->Gradient(leaf);
  return gradient;
}

inline void SetGradientOf(const at::Tensor& leaf, at::Tensor gradient) {
  GradientContext* const context = GradientContext::running();
  if (context != nullptr) return context->SetGradient(leaf, std::move(gradient));
  leaf.mutable_grad() = std::move(gradient);
}

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_GRADIENT_CONTEXT_H_
