#ifndef DDP_ELASTIC_AGENT_TIMER_PIPE_H_
#define DDP_ELASTIC_AGENT_TIMER_PIPE_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/health/worker_timers.h"

namespace ddp::elastic {

// The named pipe (TORCHELASTIC_TIMER_FILE) into which workers of PyTorch write the timers that they
// set for themselves, and the watch over these timers: the counterpart of torch's FileTimerClient.
//
// A process belongs to the worker in whose session it is; what others write is void, and so is what
// is no request. Times in the pipe are by the host's clock; once read they run by the monotonic
// one, so that somebody who sets the clock kills nobody.
//
// On the thread of the event loop.
class TimerPipe {
 public:
  // Not owned; must outlive the pipe.
  struct Dependencies {
    EventLoop* event_loop = nullptr;
    const Clock* clock = nullptr;
    // The local rank of the worker with this pid; nullopt: there is none.
    std::function<std::optional<int>(pid_t pid)> find_worker;
    std::function<void(const WorkerTimers::Expired& expired)> on_expired;
    std::function<void(const std::string& line)> say;  // see Agent::Dependencies
  };

  // Makes the pipe, which is removed at the end. One that is there already and that nobody reads
  // any more, of an earlier job of this user, is replaced.
  // kAlreadyExists: another agent serves `path`, or something else is there. kInternal: a system
  // call failed. All name it.
  static absl::StatusOr<std::unique_ptr<TimerPipe>> Open(const std::string& path,
                                                         Dependencies dependencies);
  ~TimerPipe();
  TimerPipe(const TimerPipe&) = delete;
  TimerPipe& operator=(const TimerPipe&) = delete;

  // The worker has ended.
  void Forget(int local_rank);

 private:
  TimerPipe(std::string path, UniqueFd fd, Dependencies dependencies);

  void Read();
  void TakeLine(const std::string& line);
  std::optional<int> OwnerOf(pid_t pid) const;
  void Complain(const std::string& what);
  void ArmTimer();

  const std::string path_;
  const UniqueFd fd_;
  const Dependencies dependencies_;
  WorkerTimers timers_;
  std::string line_;         // begun
  bool skips_line_ = false;  // it is too long
  int complaints_ = 0;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_TIMER_PIPE_H_
