#include "ddp/rpc/autograd_context.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include "absl/time/time.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/torch_versions.h"
#include "ddp/rpc/context_backward.h"
#include "ddp/rpc/context_calls.h"
#include "ddp/rpc/graph_walk.h"
#include "ddp/rpc/transport.h"

namespace ddp::rpc::internal {

using ddp::internal::GradientEvents;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

namespace {

using WeakNode = decltype(torch_versions::WeakNode(std::declval<torch_versions::NodePtr>()));

// The backwards of this process that run, and the newest that failed, with autograd's number of
// each once a hook has shown it.
struct Backwards {
  struct Entry {
    std::shared_ptr<EventQueue> events;
    WeakNode root;
    int graph_task = -1;

    // Returns true when `task`, whose nodes are `nodes`, is this backward.
    template <typename Nodes>
    bool Is(int task, const Nodes* nodes) {
      if (graph_task < 0 && nodes != nullptr) {
        const auto node = root.lock();
        if (node != nullptr && nodes->contains(&*node)) graph_task = task;
      }
      return graph_task == task;
    }
  };
  Mutex mutex;
  std::deque<Entry> failed ABSL_GUARDED_BY(mutex);
  std::vector<Entry> running ABSL_GUARDED_BY(mutex);
};

constexpr size_t kFailedKept = 64;

std::atomic<bool> any_failed{false};
std::atomic<int> running_count{0};

Backwards& All() {
  static Backwards* const all = new Backwards;  // hooks may run while the process ends
  return *all;
}

void Begin(const std::shared_ptr<EventQueue>& events, WeakNode root) {
  Backwards& all = All();
  MutexLock lock(all.mutex);
  all.running.push_back({.events = events, .root = std::move(root)});
  ++running_count;
}

void End(const std::shared_ptr<EventQueue>& events, bool failed) {
  Backwards& all = All();
  MutexLock lock(all.mutex);
  const auto mine = std::find_if(all.running.begin(), all.running.end(),
                                 [&](const auto& entry) { return entry.events == events; });
  if (failed) {
    all.failed.push_back(*mine);
    if (all.failed.size() > kFailedKept) all.failed.pop_front();
    any_failed = true;
  }
  all.running.erase(mine);
  --running_count;
}

// Returns the first line of the text.
std::string TextOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    const std::string text = ddp::internal::MessageOf(known);
    return text.substr(0, text.find('\n'));
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

// Counts down from the greatest number: autograd's own numbers count up from 0.
int NextTask() {
  static std::atomic<int> next{std::numeric_limits<int>::max()};
  return next--;
}

}  // namespace

// ---- EventQueue.

void EventQueue::Post(std::function<void()> event, const GraphWalk::Node* accumulator) {
  MutexLock lock(mutex_);
  if (closed_) return;
  events_.push_back({.run = std::move(event), .accumulator = accumulator});
  changed_.NotifyAll();
}

void EventQueue::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  changed_.NotifyAll();
}

std::optional<EventQueue::Event> EventQueue::Next() {
  MutexLock lock(mutex_);
  while (events_.empty() && !closed_) {
    changed_.WaitFor(mutex_, absl::InfiniteDuration());
  }
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

// ---- ContextBackward.

void ContextBackward::Install() { SetFinder(&FindEvents); }

std::shared_ptr<GradientEvents> ContextBackward::FindEvents() {
  if (running_count.load(std::memory_order_acquire) > 0 || any_failed.load()) {
    const int task = torch::autograd::get_current_graph_task_id();
    const auto* const nodes = torch::autograd::get_current_graph_task_exec_info();
    Backwards& all = All();
    MutexLock lock(all.mutex);
    for (Backwards::Entry& entry : all.running) {
      if (entry.Is(task, nodes)) return entry.events;
    }
    for (Backwards::Entry& entry : all.failed) {
      if (entry.Is(task, nodes)) return entry.events;
    }
  }
  if (ThreadLocalDistAutogradContext::getContextPtr() == nullptr) return nullptr;
  throw ConfigurationError(
      "a backward that another worker has started reaches a parameter of a "
      "DistributedDataParallel: that is not supported. Call functions of the bare module for other "
      "workers");
}

ContextBackward::ContextBackward(Context context, const GraphWalk& walk, at::Tensor root)
    : context_(std::move(context)), walk_(walk), root_(std::move(root)), task_(NextTask()) {
  const c10::Dict<at::Tensor, at::Tensor> gradients = context_->getGradients();
  for (const auto& entry : gradients) at_start_.insert(entry.key().unsafeGetTensorImpl());
}

ContextBackward::~ContextBackward() = default;

ContextBackward::Ends ContextBackward::Run(std::function<void()> engine) {
  Begin(events_, torch_versions::WeakNode(torch::autograd::impl::gradient_edge(root_).function));
  Ends ends;
  std::thread thread([this, &ends, &engine, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    try {
      engine();
    } catch (...) {
      ends.engine = std::current_exception();
    }
    events_->Close();
  });
  pthread_setname_np(thread.native_handle(), "ddp-rpc-back");
  const Running running(this);
  RunEvents(&ends.reducer);
  thread.join();
  End(events_, /*failed=*/ends.engine != nullptr);
  engine_ended_ = true;
  if (ends.engine == nullptr && ends.reducer == nullptr) {
    RunAtEnd(&ends.reducer);
  } else {
    failure_ = TextOf(ends.engine != nullptr ? ends.engine : ends.reducer);
    CallFailureHandler();
  }
  at_end_.clear();  // tells the reducers of a failure
  return ends;
}

void ContextBackward::RunEvents(std::exception_ptr* error) {
  while (const std::optional<EventQueue::Event> event = events_->Next()) {
    if (*error != nullptr) continue;
    if (event->accumulator != nullptr) arrived_.insert(event->accumulator);
    try {
      event->run();
    } catch (...) {
      *error = std::current_exception();
    }
  }
}

void ContextBackward::RunAtEnd(std::exception_ptr* error) {
  // A function may add further ones.
  for (size_t i = 0; i < at_end_.size(); ++i) {
    const std::function<void()> function = std::move(at_end_[i]);
    try {
      function();
    } catch (...) {
      *error = std::current_exception();
      return;
    }
  }
}

void ContextBackward::AtEnd(std::function<void()> function) {
  at_end_.push_back(std::move(function));
}

// While the engine runs, only its own threads may look into the context's map.
bool ContextBackward::HasGradient(const at::Tensor& leaf) const {
  if (engine_ended_) return context_->getGradients().contains(leaf);
  return at_start_.contains(leaf.unsafeGetTensorImpl()) ||
         arrived_.contains(torch::autograd::impl::try_get_grad_accumulator(leaf).get());
}

at::Tensor ContextBackward::Gradient(const at::Tensor& leaf) {
  at::Tensor result;
  if (!HasGradient(leaf)) return result;
  context_->runGradCallbackForVariable(leaf, [&](at::Tensor& gradient) {
    result = gradient;
    return false;
  });
  return result;
}

void ContextBackward::SetGradient(const at::Tensor& leaf, at::Tensor gradient) {
  if (HasGradient(leaf)) {
    context_->runGradCallbackForVariable(leaf, [&](at::Tensor& stored) {
      stored = std::move(gradient);
      return true;
    });
    return;
  }
  TORCH_CHECK(engine_ended_,
              "a gradient that has not come was set "
              "before its end");
  // A handle of the context's own map.
  c10::Dict<at::Tensor, at::Tensor> gradients = context_->getGradients();
  gradients.insert(leaf, std::move(gradient));
}

}  // namespace ddp::rpc::internal

// ---- AutogradContext.

namespace ddp::rpc {

namespace libtorch = torch::distributed::autograd;
using internal::ContextCalls;

namespace {

libtorch::ContextPtr NewContext() {
  (void)internal::Transport::Get();
  auto& container = libtorch::DistAutogradContainer::getInstance();
  if (container.hasValidContext()) {
    throw ConfigurationError(
        "this thread has an open rpc::AutogradContext: end it before you begin another one");
  }
  return container.newContext();
}

}  // namespace

struct AutogradContext::State {
  const libtorch::ContextPtr context = NewContext();
  const std::shared_ptr<ContextCalls> calls = std::make_shared<ContextCalls>();
  const ContextCalls::Scope scope{calls};
};

AutogradContext::AutogradContext() : state_(std::make_unique<State>()) {
  state_->calls->GuardAnswers();
}

AutogradContext::~AutogradContext() {
  try {
    libtorch::DistAutogradContainer::getInstance().releaseContext(id());
  } catch (const std::exception& error) {
    LOG(WARNING) << "an autograd context could not be released on the other workers: "
                 << ddp::internal::MessageOf(error);
  }
}

int64_t AutogradContext::id() const { return state_->context->contextId(); }

void AutogradContext::backward(const at::Tensor& loss, bool retain_graph) {
  backward(std::vector<at::Tensor>{loss}, retain_graph);
}

void AutogradContext::backward(const std::vector<at::Tensor>& roots, bool retain_graph) {
  const auto transport = internal::Transport::Get();
  internal::GraphWalk walk;
  for (const at::Tensor& root : roots) {
    if (!root.defined() || root.numel() != 1 || root.grad_fn() == nullptr) {
      throw ConfigurationError(
          "AutogradContext::backward needs scalars that require gradients, and are no leaves, as "
          "its roots");
    }
    walk.AddRoot(root);
  }
  if (roots.empty()) throw ConfigurationError("AutogradContext::backward needs a root");
  // The gradients of what this worker has sent come back from the other workers.
  for (const auto& [number, node] : state_->context->sendFunctions()) walk.AddRoot(node.get());
  const std::optional<std::string> problem =
      state_->calls->Problem([&](const void* node) { return walk.Reaches(node); });
  if (problem.has_value()) throw ConfigurationError("AutogradContext::backward: " + *problem);

  internal::ContextBackward backward(state_->context, walk, roots.front());
  const ContextCalls::Backward running(*state_->calls);
  const auto ends = backward.Run([&] {
    try {
      libtorch::backward(state_->context->contextId(), roots, retain_graph);
    } catch (...) {
      // Here, because the reducers' peers get the text.
      transport->Throw(std::current_exception(), /*worker=*/-1, "backward");
    }
  });
  if (ends.reducer != nullptr) std::rethrow_exception(ends.reducer);
  if (ends.engine != nullptr) std::rethrow_exception(ends.engine);
}

at::Tensor AutogradContext::grad(const at::Tensor& leaf) const {
  const c10::Dict<at::Tensor, at::Tensor> gradients = state_->context->getGradients();
  const auto found = gradients.find(leaf);
  return found == gradients.end() ? at::Tensor() : found->value();
}

}  // namespace ddp::rpc
