#include "testing/accelerator/runtime/stream.h"

#include <pthread.h>

#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace ddp::testing {

Stream::Stream(StreamPlace place, LatenessOf lateness)
    : lateness_(std::move(lateness)), thread_([this, place] {
        const std::string name = absl::StrCat("sim ", place.device, "/", place.stream);
        pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
        Run();
      }) {}

Stream::~Stream() {
  Finish();
  {
    MutexLock lock(mutex_);
    ending_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void Stream::Launch(std::function<void()> task) {
  MutexLock lock(mutex_);
  const absl::Duration lateness = lateness_(++kernels_);
  Append({.run = std::move(task), .lateness = lateness});
}

void Stream::LaunchPrompt(std::function<void()> task) {
  MutexLock lock(mutex_);
  Append({.run = std::move(task)});
}

std::shared_ptr<Completion> Stream::Record() {
  MutexLock lock(mutex_);
  const int64_t position = appended_ + 1;
  auto completion = std::make_shared<Completion>([this, position] { HurryTo(position); });
  Append({.completes = completion});
  return completion;
}

void Stream::WaitFor(std::shared_ptr<Completion> completion) {
  MutexLock lock(mutex_);
  Append({.wait_for = std::move(completion)});
}

void Stream::Synchronize() {
  const std::shared_ptr<Completion> completion = Record();
  completion->Hurry();
  completion->Wait();
}

bool Stream::idle() const {
  MutexLock lock(mutex_);
  return tasks_.empty();
}

void Stream::Finish() { HurryTo(std::numeric_limits<int64_t>::max()); }

int64_t Stream::Append(Task task) {
  task.position = ++appended_;
  tasks_.push_back(std::move(task));
  changed_.NotifyAll();
  return appended_;
}

void Stream::HurryTo(int64_t position) {
  std::shared_ptr<Completion> awaited;
  {
    MutexLock lock(mutex_);
    if (position <= hurry_to_) return;
    hurry_to_ = position;
    changed_.NotifyAll();
    if (!tasks_.empty() && tasks_.front().position <= position) awaited = tasks_.front().wait_for;
  }
  if (awaited) awaited->Hurry();
}

void Stream::AwaitTurn(const Task& task) {
  if (task.wait_for) {
    bool hurried = false;
    {
      MutexLock lock(mutex_);
      hurried = task.position <= hurry_to_;
    }
    if (hurried) task.wait_for->Hurry();
    task.wait_for->Wait();
    return;
  }
  const MonotonicClock clock;
  const absl::Time due = clock.Now() + task.lateness;
  MutexLock lock(mutex_);
  while (task.position > hurry_to_) {
    const absl::Duration left = due - clock.Now();
    if (left <= absl::ZeroDuration()) return;
    changed_.WaitFor(mutex_, left);
  }
}

void Stream::Run() {
  for (;;) {
    Task* task = nullptr;
    {
      MutexLock lock(mutex_);
      while (tasks_.empty()) {
        if (ending_) return;
        changed_.WaitFor(mutex_, absl::InfiniteDuration());
      }
      task = &tasks_.front();  // appending to a deque does not move its elements
    }
    AwaitTurn(*task);
    if (task->run) task->run();
    // What the task owns goes before the next task runs, and without the lock: a destructor may
    // free memory, which launches a task.
    task->run = nullptr;
    std::shared_ptr<Completion> completes;
    {
      MutexLock lock(mutex_);
      completes = std::move(task->completes);
      tasks_.pop_front();
    }
    if (completes) completes->Complete();  // now, so that a stream that was waited for is idle
  }
}

}  // namespace ddp::testing
