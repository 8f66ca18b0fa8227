#include "ddp/comm/reports/deferred_writes.h"

#include <pthread.h>

#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/time/time.h"

namespace ddp::internal {

DeferredWrites::~DeferredWrites() {
  std::thread thread;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

void DeferredWrites::Run(std::function<void()> write) {
  if (std::uncaught_exceptions() == 0) {
    Flush();  // the writes of one thread stay in order
    write();
    return;
  }
  RunLater(std::move(write));
}

void DeferredWrites::RunLater(std::function<void()> write) {
  MutexLock lock(mutex_);
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { Work(); });
    } catch (const std::exception& error) {
      LOG(WARNING) << "the peers get no report, because no thread can be started: " << error.what();
      return;
    }
    pthread_setname_np(thread_.native_handle(), "ddp-report");
  }
  queue_.push_back(std::move(write));
  changed_.NotifyAll();
}

void DeferredWrites::Flush() {
  MutexLock lock(mutex_);
  while (!queue_.empty()) changed_.WaitFor(mutex_, absl::InfiniteDuration());
}

void DeferredWrites::Work() {
  while (true) {
    std::function<void()> write;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) changed_.WaitFor(mutex_, absl::InfiniteDuration());
      if (queue_.empty()) return;
      write = queue_.front();
    }
    write();
    MutexLock lock(mutex_);
    queue_.pop_front();
    changed_.NotifyAll();
  }
}

}  // namespace ddp::internal
