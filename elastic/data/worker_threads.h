#ifndef DDP_ELASTIC_DATA_WORKER_THREADS_H_
#define DDP_ELASTIC_DATA_WORKER_THREADS_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace ddp::elastic {

// A fixed number of threads that run jobs. A job begins in the order of Submit(); several run at
// once. Thread-safe, but for the destructor.
class WorkerThreads {
 public:
  // `worker`: the number of the thread that runs the job, from 0. Must not throw.
  using Job = std::function<void(int worker)>;

  // Starts `count` threads, at least 1. Throws std::system_error when there is none left; then
  // none runs.
  explicit WorkerThreads(int count);
  // Drops the jobs that have not begun, and blocks until the others have ended.
  ~WorkerThreads();
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  void Submit(Job job) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops the jobs that have not begun.
  void DropWaiting() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run(int worker) ABSL_LOCKS_EXCLUDED(mutex_);
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> waiting_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // last, because the threads use all other members
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_DATA_WORKER_THREADS_H_
