#include "elastic/data/worker_threads.h"

#include <sys/prctl.h>

#include <utility>

#include "absl/time/time.h"
#include "base/blocked_signals.h"
#include "glog/logging.h"

namespace ddp::elastic {

WorkerThreads::WorkerThreads(int count) {
  CHECK_GE(count, 1);
  const BlockedSignals blocked;
  try {
    for (int worker = 0; worker < count; ++worker) {
      threads_.emplace_back([this, worker] {
        prctl(PR_SET_NAME, "ddp-data");
        Run(worker);
      });
    }
  } catch (...) {
    End();
    throw;
  }
}

WorkerThreads::~WorkerThreads() { End(); }

void WorkerThreads::End() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
    waiting_.clear();
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::Submit(Job job) {
  MutexLock lock(mutex_);
  waiting_.push_back(std::move(job));
  changed_.NotifyOne();
}

void WorkerThreads::DropWaiting() {
  std::deque<Job> dropped;  // ends after the lock
  MutexLock lock(mutex_);
  dropped.swap(waiting_);
}

void WorkerThreads::Run(int worker) {
  while (true) {
    Job job;
    {
      MutexLock lock(mutex_);
      while (waiting_.empty() && !ending_) changed_.WaitFor(mutex_, absl::InfiniteDuration());
      if (waiting_.empty()) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
    }
    job(worker);
  }
}

}  // namespace ddp::elastic
