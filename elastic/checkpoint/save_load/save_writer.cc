#include "elastic/checkpoint/save_load/save_writer.h"

#include <sys/prctl.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/blocked_signals.h"
#include "base/mutex.h"

namespace ddp::elastic {

struct SaveWriter::Task::Shared {
  Mutex mutex;
  CondVar changed;                                                   // any of the fields below
  std::deque<std::shared_ptr<Task>> pending ABSL_GUARDED_BY(mutex);  // the first one is running
  int64_t progress ABSL_GUARDED_BY(mutex) = 0;
  bool ending ABSL_GUARDED_BY(mutex) = false;
};

namespace {

// Bounds one wait for a change. Every change wakes the waiting threads.
constexpr absl::Duration kLook = absl::Minutes(1);

absl::StatusOr<std::string> Guarded(const SaveWriter::Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace

const absl::StatusOr<std::string>* SaveWriter::Task::Result() const {
  MutexLock lock(shared_->mutex);
  return result_.get();
}

const absl::StatusOr<std::string>& SaveWriter::Task::Await(
    const std::function<void()>& on_progress) const {
  int64_t seen = 0;
  while (true) {
    bool moved = false;
    {
      MutexLock lock(shared_->mutex);
      while (result_ == nullptr && shared_->progress == seen)
        shared_->changed.WaitFor(shared_->mutex, kLook);
      if (result_ != nullptr) return *result_;
      moved = shared_->progress != seen;
      seen = shared_->progress;
    }
    if (moved && on_progress != nullptr) on_progress();
  }
}

SaveWriter::SaveWriter() : shared_(std::make_shared<Task::Shared>()) {}

SaveWriter::~SaveWriter() {
  {
    MutexLock lock(shared_->mutex);
    shared_->ending = true;
  }
  shared_->changed.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<const SaveWriter::Task> SaveWriter::Ended(absl::StatusOr<std::string> result) {
  auto task = std::make_shared<Task>();
  task->shared_ = std::make_shared<Task::Shared>();
  task->result_ = std::make_unique<const absl::StatusOr<std::string>>(std::move(result));
  return task;
}

std::shared_ptr<const SaveWriter::Task> SaveWriter::Add(Work work,
                                                        const std::function<void()>& on_progress) {
  if (!thread_.joinable()) {
    const BlockedSignals blocked;
    try {
      thread_ = std::thread([this] {
        prctl(PR_SET_NAME, "ddp-checkpoint");
        Run();
      });
    } catch (const std::system_error&) {
      return RunHere(std::move(work), on_progress);
    }
  }
  while (true) {
    {
      MutexLock lock(shared_->mutex);
      if (shared_->pending.size() < kPendingMax) break;
    }
    AwaitOldest(on_progress);
  }
  auto task = std::make_shared<Task>();
  task->shared_ = shared_;
  task->work_ = std::move(work);
  {
    MutexLock lock(shared_->mutex);
    shared_->pending.push_back(task);
  }
  shared_->changed.NotifyAll();
  return task;
}

std::shared_ptr<const SaveWriter::Task> SaveWriter::RunHere(
    Work work, const std::function<void()>& on_progress) {
  Drain(on_progress);
  return Ended(work());
}

void SaveWriter::Drain(const std::function<void()>& on_progress) {
  std::shared_ptr<Task> last;
  {
    MutexLock lock(shared_->mutex);
    if (shared_->pending.empty()) return;
    last = shared_->pending.back();
  }
  last->Await(on_progress);
}

void SaveWriter::AwaitOldest(const std::function<void()>& on_progress) {
  std::shared_ptr<Task> oldest;
  {
    MutexLock lock(shared_->mutex);
    if (shared_->pending.empty()) return;
    oldest = shared_->pending.front();
  }
  oldest->Await(on_progress);
}

bool SaveWriter::IsIdle() const {
  MutexLock lock(shared_->mutex);
  return shared_->pending.empty();
}

void SaveWriter::Progressed() {
  {
    MutexLock lock(shared_->mutex);
    ++shared_->progress;
  }
  shared_->changed.NotifyAll();
}

bool SaveWriter::IsWriterThread() const { return std::this_thread::get_id() == thread_.get_id(); }

void SaveWriter::Run() {
  while (true) {
    std::shared_ptr<Task> task;
    {
      MutexLock lock(shared_->mutex);
      while (shared_->pending.empty() && !shared_->ending)
        shared_->changed.WaitFor(shared_->mutex, kLook);
      if (shared_->pending.empty()) return;
      task = shared_->pending.front();
    }
    auto result = std::make_unique<const absl::StatusOr<std::string>>(Guarded(task->work_));
    task->work_ = nullptr;  // returns its staging buffer
    {
      MutexLock lock(shared_->mutex);
      task->result_ = std::move(result);
      shared_->pending.pop_front();
    }
    shared_->changed.NotifyAll();
  }
}

}  // namespace ddp::elastic
