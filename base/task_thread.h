#ifndef DDP_BASE_TASK_THREAD_H_
#define DDP_BASE_TASK_THREAD_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"

namespace ddp {

// Runs tasks on a named thread, one after the other, and calls the `done` of each ended task on the
// event loop. For calls that have no non-blocking form: a write to a file on a stalled mount, the
// wait for the first answer of a server.
//
//   thread->Run([file] { file->Write(); }, [this] { OnWritten(); });
//
// The thread is detached: a running task may outlive this object and its owner. A task and its
// `done` therefore share data through a shared_ptr. The first Run() starts the thread, with all
// signals blocked.
//
// Thread-compatible: every call and every `done` runs on the thread of the event loop.
class TaskThread {
 public:
  // `event_loop` is not owned and must outlive the object. `name`: at most 15 bytes. Errors:
  // kInternal (eventfd, epoll).
  static absl::StatusOr<std::unique_ptr<TaskThread>> Create(EventLoop* event_loop,
                                                            std::string name);

  // Never blocks. Drops tasks that have not begun. A running task continues to its end on the
  // detached thread. No `done` is called any more.
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // Runs `task` on the thread, after all earlier tasks, then `done` on the event loop. If no thread
  // can be started, runs `task` at once on the calling thread, and so may block.
  void Run(std::function<void()> task, std::function<void()> done);

  // Returns the number of tasks whose `done` has not been called yet.
  size_t pending() const;

  // For a caller that waits without the event loop: fd() is readable while a `done` is due, and
  // Dispatch() calls each `done` that is due.
  int fd() const;
  void Dispatch();

 private:
  struct State;
  TaskThread(EventLoop* event_loop, std::string name);
  void StartThread();

  EventLoop* const event_loop_;
  const std::string name_;
  const std::shared_ptr<State> state_;
  bool started_ = false;
  size_t pending_ = 0;
};

}  // namespace ddp

#endif  // DDP_BASE_TASK_THREAD_H_
