#ifndef DDP_ELASTIC_TIMERS_TIMER_PIPE_H_
#define DDP_ELASTIC_TIMERS_TIMER_PIPE_H_

#include <sys/types.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/timers/worker_timers.h"

namespace ddp::elastic {

// The named pipe (TORCHELASTIC_TIMER_FILE) into which PyTorch workers write requests for timers,
// and the watch over these timers. A worker whose timer runs out gets a signal. This class does the
// work of torch's FileTimerServer; the workers use torch's FileTimerClient. WorkerGroup owns it.
//
// A process belongs to the worker whose session it is in. Requests of other processes are dropped
// after a second: a new worker may write before its agent knows it. Malformed requests are dropped
// at once. Times in the pipe are by the host's clock. They are converted to the
// monotonic clock when read, so a later change of the host's clock kills no worker.
//
// Thread: the event loop's.
class TimerPipe {
 public:
  // Not owned; must outlive the pipe.
  struct Dependencies {
    EventLoop* event_loop = nullptr;
    const Clock* clock = nullptr;
    // Returns the local rank of the worker with this pid; nullopt: none.
    std::function<std::optional<int>(pid_t pid)> find_worker;
    std::function<void(const WorkerTimers::Expired& expired)> on_expired;
    std::function<void(const std::string& line)> say;  // see Agent::Dependencies
  };

  // Makes the pipe; the destructor removes it. Replaces a pipe of an earlier job of this user that
  // has no reader. Errors: kAlreadyExists (another agent serves `path`, or `path` is something
  // else), kInternal (a system call failed). All name the path.
  static absl::StatusOr<std::unique_ptr<TimerPipe>> Open(const std::string& path,
                                                         Dependencies dependencies);
  ~TimerPipe();
  TimerPipe(const TimerPipe&) = delete;
  TimerPipe& operator=(const TimerPipe&) = delete;

  // Drops the timers of a worker that has ended.
  void Forget(int local_rank);

 private:
  TimerPipe(std::string path, UniqueFd fd, Dependencies dependencies);

  void Read();
  void TakeLine(const std::string& line);
  void TakeEarly();
  std::optional<int> OwnerOf(pid_t pid) const;
  void Complain(const std::string& what);
  void ArmTimer();

  const std::string path_;
  const UniqueFd fd_;
  const Dependencies dependencies_;
  WorkerTimers timers_;
  std::string line_;         // incomplete line
  bool skips_line_ = false;  // the current line is too long
  int complaints_ = 0;
  EventLoop::TimerId timer_ = 0;

  // Requests of processes that belong to no known worker, in order.
  struct Early {
    TimerRequest request;
    int looks = 0;
  };
  std::deque<Early> early_;
  EventLoop::TimerId early_timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_TIMERS_TIMER_PIPE_H_
