#include "base/task_thread.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/detached_thread.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace ddp {
namespace {

struct Task {
  std::function<void()> task;
  std::function<void()> done;
};

}  // namespace

// State shared by the owner's thread and the task thread. The last owner destroys it.
struct TaskThread::State {
  UniqueFd event;  // const after Create()
  Mutex mutex;
  CondVar changed;
  std::deque<Task> queue ABSL_GUARDED_BY(mutex);
  std::vector<std::function<void()>> ended ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;

  // Body of the thread: runs tasks until `stopping`.
  void RunTasks();
  void Finish(std::function<void()> done);
};

void TaskThread::State::RunTasks() {
  while (true) {
    Task task;
    {
      MutexLock lock(mutex);
      while (queue.empty() && !stopping) changed.WaitFor(mutex, absl::InfiniteDuration());
      if (stopping) return;
      task = std::move(queue.front());
      queue.pop_front();
    }
    task.task();
    task.task = nullptr;  // destroys its captures before `done` may be called
    Finish(std::move(task.done));
  }
}

void TaskThread::State::Finish(std::function<void()> done) {
  bool first = false;
  {
    MutexLock lock(mutex);
    // After the owner's destructor, `done` is destroyed without a call: it may point to the owner.
    if (stopping) return;
    first = ended.empty();
    ended.push_back(std::move(done));
  }
  const uint64_t one = 1;
  if (first) (void)!write(event.get(), &one, sizeof(one));
}

TaskThread::TaskThread(EventLoop* event_loop, std::string name)
    : event_loop_(event_loop), name_(std::move(name)), state_(std::make_shared<State>()) {}

absl::StatusOr<std::unique_ptr<TaskThread>> TaskThread::Create(EventLoop* event_loop,
                                                               std::string name) {
  std::unique_ptr<TaskThread> thread(new TaskThread(event_loop, std::move(name)));
  UniqueFd& event = thread->state_->event;
  event.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) return absl::InternalError(absl::StrCat("eventfd: ", strerror(errno)));
  TaskThread* const self = thread.get();
  DDP_RETURN_IF_ERROR(
      event_loop->Watch(event.get(), EPOLLIN, [self](uint32_t) { self->Dispatch(); }));
  return thread;
}

TaskThread::~TaskThread() {
  event_loop_->Unwatch(fd());
  std::deque<Task> dropped;  // destroyed without the lock
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    dropped.swap(state_->queue);
  }
  state_->changed.NotifyAll();
}

int TaskThread::fd() const { return state_->event.get(); }

size_t TaskThread::pending() const { return pending_; }

void TaskThread::Run(std::function<void()> task, std::function<void()> done) {
  ++pending_;
  if (!started_)
    started_ = StartDetachedThread(name_, [state = state_] { state->RunTasks(); }).ok();
  if (!started_) {  // no thread can be started
    task();
    state_->Finish(std::move(done));
    return;
  }
  {
    MutexLock lock(state_->mutex);
    state_->queue.push_back({std::move(task), std::move(done)});
  }
  state_->changed.NotifyOne();
}

void TaskThread::Dispatch() {
  uint64_t count = 0;
  (void)!read(fd(), &count, sizeof(count));
  std::vector<std::function<void()>> ended;
  {
    MutexLock lock(state_->mutex);
    ended.swap(state_->ended);
  }
  // A `done` may destroy this object.
  const std::shared_ptr<State> state = state_;
  for (const std::function<void()>& done : ended) {
    {
      MutexLock lock(state->mutex);
      if (state->stopping) return;
    }
    --pending_;
    if (done) done();
  }
}

}  // namespace ddp
