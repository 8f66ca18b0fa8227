#include "ddp/reducer/backward_watch.h"

#include <algorithm>
#include <exception>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/reducer/current_backward.h"

namespace ddp::internal {

// Reports the end of a backward. Lives as long as the graph task that owns its callback.
class BackwardWatch::Token {
 public:
  Token(std::shared_ptr<Self> self, int task) : self_(std::move(self)), task_(task) {}
  // On a device, autograd's thread may come here after backward() has thrown on the caller's.
  ~Token() {
    if (!ended_) Leave(/*with_exception=*/true);
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

  void End() {
    ended_ = true;
    Leave(/*with_exception=*/false);
  }

 private:
  void Leave(bool with_exception) {
    const EngineLock::Scope lock(*self_->lock);
    if (self_->watch != nullptr) self_->watch->Leave(task_, with_exception);
  }

  const std::shared_ptr<Self> self_;
  const int task_;
  bool ended_ = false;
};

namespace {

// How long the threads of autograd may need to end a backward that has thrown.
constexpr absl::Duration kLongestEnd = absl::Seconds(10);
constexpr absl::Duration kEndLook = absl::Milliseconds(10);

// The synchronized forwards of this process whose graphs may be alive.
struct Forwards {
  struct Entry {
    std::weak_ptr<BackwardWatch*> watch;  // expired: it has ended
    std::weak_ptr<ForwardRecord> record;
  };
  Mutex mutex;
  std::vector<Entry> entries ABSL_GUARDED_BY(mutex);
};

Forwards& AllForwards() {
  static Forwards* const all = new Forwards;
  return *all;
}

bool ReachesForward(const GradientContext& context, const ForwardRecord& record) {
  const auto& nodes = context.nodes();
  return std::any_of(nodes.begin(), nodes.end(), [&](const torch::autograd::Node* node) {
    return record.Created(node->thread_id(), node->sequence_nr());
  });
}

// Returns true when the current backward accumulates gradients in leaves. torch::autograd::grad()
// does not: it only returns gradients.
bool AccumulatesGradients() {
  if (GradientContext::running() != nullptr) return true;
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return true;  // backward() without inputs: all leaves
  return std::any_of(wanted->begin(), wanted->end(), [](const auto& entry) {
    const bool is_leaf = entry.first->next_edges().empty();
    return is_leaf && entry.second.needed_;
  });
}

// Called when a backward passes an output, and the watch of its forward has ended.
void CheckReducedBefore(const ForwardRecord& record, size_t output) {
  const bool awaits =
      record.synchronized && record.outputs[output] != ForwardRecord::Output::kReduced;
  if (!awaits || !AccumulatesGradients()) return;
  throw ReductionError(
      "the DistributedDataParallel of this forward was destroyed before its backward, so the "
      "gradients would not be averaged: keep the DistributedDataParallel until backward() has "
      "returned");
}

}  // namespace

void CheckForwardInContext(const ForwardRecord& record) {
  if (record.synchronized || GradientContext::running() == nullptr) return;
  throw ConfigurationError(
      "no_sync is not supported in a distributed autograd context: its gradients would be in no "
      "reduction. Make each forward of the context a synchronized one");
}

BackwardWatch::BackwardWatch(Observer* observer, std::shared_ptr<EngineLock> lock)
    : observer_(observer),
      self_(std::make_shared<Self>(Self{.lock = std::move(lock), .watch = this})),
      alive_(std::make_shared<BackwardWatch*>(this)) {
  GradientContext::SetFailureHandler(&OnContextFailure);
}

BackwardWatch::~BackwardWatch() {
  const EngineLock::Scope lock(*self_->lock);
  self_->watch = nullptr;
}

bool BackwardWatch::Watch(const std::vector<at::Tensor>& outputs,
                          const std::shared_ptr<ForwardRecord>& record) {
  bool all = true;
  record->outputs.assign(outputs.size(), ForwardRecord::Output::kFresh);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    // A parameter that is returned as an output would keep the hook for ever.
    if (outputs[i].is_leaf()) {
      all = false;
      continue;
    }
    outputs[i].register_hook([self = self_, record, i](const at::Tensor&) {
      const auto enter = [self, record, i] {
        const EngineLock::Scope lock(*self->lock);
        if (self->watch == nullptr) return CheckReducedBefore(*record, i);
        self->watch->Enter(record, i);
      };
      const auto events = GradientContext::OfHook();
      events == nullptr ? enter() : events->Post(enter);
    });
  }
  if (record->synchronized && GradientContext::possible()) {
    Forwards& forwards = AllForwards();
    const MutexLock lock(forwards.mutex);
    std::erase_if(forwards.entries, [](const auto& entry) { return entry.record.expired(); });
    forwards.entries.push_back({.watch = alive_, .record = record});
  }
  return all;
}

void BackwardWatch::AwaitEnd() const {
  if (!self_->lock->enabled() || BackwardTask() >= 0) return;
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + kLongestEnd;
  while (clock.Now() < deadline) {
    {
      const EngineLock::Scope lock(*self_->lock);
      if (current_.task < 0) return;
    }
    MutexLock lock(left_mutex_);
    left_.WaitFor(left_mutex_, kEndLook);
  }
  LOG(WARNING) << "a backward has not ended within " << absl::FormatDuration(kLongestEnd);
}

void BackwardWatch::Begin(int task) {
  current_ = {.task = task};
  creates_graph_ = at::GradMode::is_enabled();
  first_node_ = at::sequence_number::peek();
  thread_ = at::RecordFunction::currentThreadId();
  const auto token = std::make_shared<Token>(self_, task);
  AtBackwardEnd([token] { token->End(); });
  observer_->OnBackwardBegin();
}

void BackwardWatch::Enter(const std::shared_ptr<ForwardRecord>& record, size_t output) {
  CheckForwardInContext(*record);
  const int task = BackwardTask();
  if (task != current_.task) Begin(task);
  if (record->outputs[output] == ForwardRecord::Output::kFresh) {
    record->outputs[output] = ForwardRecord::Output::kPassed;
  }
  current_.collectives |= record->collectives;
  if (record->synchronized) AddSynchronized(record);
}

// Autograd runs the backward of a CPU tensor on the thread that ends it.
void BackwardWatch::RecordCreatedNodes() const {
  if (!creates_graph_ || at::RecordFunction::currentThreadId() != thread_) return;
  for (const std::shared_ptr<ForwardRecord>& record : current_.synchronized) {
    record->of_gradients.push_back(
        {.thread = thread_, .first = first_node_, .end = at::sequence_number::peek()});
  }
}

void BackwardWatch::AddSynchronized(const std::shared_ptr<ForwardRecord>& record) {
  std::vector<std::shared_ptr<ForwardRecord>>& known = current_.synchronized;
  if (std::find(known.begin(), known.end(), record) == known.end()) known.push_back(record);
}

// The backward may have failed before it came to an output. The peers wait all the same.
void BackwardWatch::OnContextFailure() {
  const GradientContext& context = *GradientContext::running();
  std::vector<Forwards::Entry> entries;
  {
    Forwards& forwards = AllForwards();
    const MutexLock lock(forwards.mutex);
    entries = forwards.entries;
  }
  for (const Forwards::Entry& entry : entries) {
    const auto record = entry.record.lock();
    if (record == nullptr || !ReachesForward(context, *record)) continue;
    const auto watch = entry.watch.lock();
    if (watch == nullptr) continue;
    try {
      if ((*watch)->current_.task != context.task()) (*watch)->Begin(context.task());
    } catch (const std::exception& error) {
      // The backward's own error is the one to throw.
      LOG(WARNING) << "after a failed backward: " << error.what();
    }
    std::replace(record->outputs.begin(), record->outputs.end(), ForwardRecord::Output::kFresh,
                 ForwardRecord::Output::kPassed);
    (*watch)->current_.collectives |= record->collectives;
    (*watch)->AddSynchronized(record);
  }
}

void BackwardWatch::Leave(int task, bool with_exception) {
  if (task != current_.task) return;
  if (with_exception) {
    observer_->OnBackwardException();
    current_ = {};
    left_.NotifyAll();
    return;
  }
  RecordCreatedNodes();
  current_.task = -1;  // the work after this point belongs to another backward
  observer_->OnBackwardEnd();
  current_ = {};
}

}  // namespace ddp::internal
