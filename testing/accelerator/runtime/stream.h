#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_STREAM_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_STREAM_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "testing/accelerator/runtime/completion.h"
#include "testing/accelerator/runtime/stream_place.h"

namespace ddp::testing {

// A queue of tasks and the thread that runs them, one by one, in the order of their launch.
//
// A kernel runs late, by a time that `lateness` returns for its number. Lateness ends at once when
// the host waits for the kernel, or for a kernel of another stream that waits for it: hurry passes
// on through waits for completions. So a program that is right loses no time.
//
// A task must not throw. A task may block: whoever made it block releases it. Thread-safe.
class Stream {
 public:
  using LatenessOf = std::function<absl::Duration(int64_t number)>;

  Stream(StreamPlace place, LatenessOf lateness);
  // Runs all tasks without lateness, then ends the thread. Other streams must be alive: Finish()
  // them all first.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Appends a kernel.
  void Launch(std::function<void()> task);
  // Appends a task that is never late, and does not count as a kernel.
  void LaunchPrompt(std::function<void()> task);
  // Appends a completion, which completes when all tasks before it have run.
  std::shared_ptr<Completion> Record();
  // Lets no later task run before `completion`.
  void WaitFor(std::shared_ptr<Completion> completion);
  // Blocks until all tasks have run, without lateness.
  void Synchronize();
  // Whether all tasks have run.
  bool idle() const;
  // From now on no task is late.
  void Finish();

 private:
  struct Task {
    std::function<void()> run;              // null: nothing runs. Of the stream's thread alone
    std::shared_ptr<Completion> wait_for;   // null: none
    std::shared_ptr<Completion> completes;  // null: none
    absl::Duration lateness;
    int64_t position = 0;  // in the queue, from 1
  };

  int64_t Append(Task task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HurryTo(int64_t position);
  void Run();
  // Waits for what the front of the queue waits for.
  void AwaitTurn(const Task& task);

  const LatenessOf lateness_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);  // the front one runs
  int64_t appended_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t kernels_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t hurry_to_ ABSL_GUARDED_BY(mutex_) = 0;  // no task up to this position is late
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: it uses all the above
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_STREAM_H_
