#ifndef DDP_COMM_REPORTS_DEFERRED_WRITES_H_
#define DDP_COMM_REPORTS_DEFERRED_WRITES_H_

#include <deque>
#include <functional>
#include <thread>

#include "base/mutex.h"

namespace ddp::internal {

// Runs writes to the store. While an exception unwinds the calling thread, the thread "ddp-report"
// runs them, so that no destructor calls the store itself. The first write that is handed over
// starts that thread. If it cannot be started, the write is dropped with a warning.
//
// Thread-safe.
class DeferredWrites {
 public:
  DeferredWrites() = default;

  // Blocks until all writes have run, then joins the thread.
  ~DeferredWrites();
  DeferredWrites(const DeferredWrites&) = delete;
  DeferredWrites& operator=(const DeferredWrites&) = delete;

  // Runs `write` on the calling thread. While an exception unwinds that thread, hands `write` to
  // the thread "ddp-report" instead and returns at once. Never throws.
  // `write` must not throw, must not call this object, and must end within a bounded time. Writes
  // of one thread run in order.
  void Run(std::function<void()> write);

  // Hands `write` to the thread "ddp-report" in every case, and returns at once. Otherwise as
  // Run().
  void RunLater(std::function<void()> write);

  // Blocks until all writes that were handed over have run.
  void Flush();

 private:
  void Work();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);  // the first one may be running
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_DEFERRED_WRITES_H_
