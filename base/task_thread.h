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

// Runs calls that may block on a named thread, one after the other, and reports each end on the
// event loop. For system calls that the kernel cannot do without waiting: a file on a mount that
// has stalled, the first answer of a server.
//
//   thread->Run([file] { file->Write(); }, [this] { OnWritten(); });
//
// A task and its `done` share what they need through a shared_ptr: the thread may outlive this
// object and everything else but the process. The thread is started by the first task, with all
// signals blocked.
//
// Thread-compatible: everything here, `done` included, is on the thread of the event loop.
class TaskThread {
 public:
  // `event_loop` is not owned and must outlive the object. `name`: at most 15 bytes. Errors:
  // kInternal (eventfd, epoll).
  static absl::StatusOr<std::unique_ptr<TaskThread>> Create(EventLoop* event_loop,
                                                            std::string name);

  // Never waits. Drops tasks that have not begun. A running task runs to its end, by itself. No
  // `done` is called any more.
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // Runs `task` on the thread, after all earlier tasks, then `done` on the event loop. Where no
  // thread can be had, runs `task` at once on the calling thread.
  void Run(std::function<void()> task, std::function<void()> done);

  // Tasks whose `done` has not been called yet.
  size_t pending() const;

  // For a caller that waits without the event loop: fd() is readable while Dispatch() has
  // something to do, and Dispatch() calls each `done` that is due.
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
