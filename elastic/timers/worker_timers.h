// Timers that workers set for themselves, and that end the worker when they run out: the file-based
// form of torch.distributed.elastic.timer. Pure: no clock, and no process is killed here.
#ifndef DDP_ELASTIC_TIMERS_WORKER_TIMERS_H_
#define DDP_ELASTIC_TIMERS_WORKER_TIMERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::elastic {

// A line that a worker writes into the agent's named pipe (TimerPipe), a JSON object:
//   version           1
//   pid               of the process that set the timer
//   scope_id          the timer's name in that process
//   expiration_time   seconds since 1970 by the host's clock; negative: the timer is released
//   signal            sent to the process whose timer runs out; not positive: none
struct TimerRequest {
  static constexpr size_t kMaxBytes = 4096;  // atomic write size of a pipe

  int64_t pid = 0;
  std::string scope;
  double expiration_unix_s = 0;
  int signal = 0;

  bool is_release() const { return expiration_unix_s < 0; }
};

// Parses a line. Errors: kInvalidArgument (no such object, or another version).
absl::StatusOr<TimerRequest> ParseTimerRequest(const std::string& line);

// The running timers. TimerPipe owns them. Thread-compatible.
class WorkerTimers {
 public:
  // Upper bound on the timers, so that workers cannot exhaust the agent's memory.
  static constexpr size_t kMaxTimers = 65536;

  struct Expired {
    int local_rank = 0;
    std::string scope;
    int signal = 0;
  };

  // Sets or releases a timer of process `request.pid` of worker `local_rank`. The timer ends at
  // `deadline`. Replaces a timer of the same name. Errors: kResourceExhausted (kMaxTimers run
  // already).
  absl::Status Apply(int local_rank, const TimerRequest& request, absl::Time deadline);

  // Drops the timers of a worker that has ended.
  void Forget(int local_rank);

  // Returns the earliest deadline; infinite: no timer runs.
  absl::Time next_deadline() const;

  // Returns the expired timers, at most one for each worker: the earliest that has a signal.
  // Removes all timers of every process that has an expired one.
  std::vector<Expired> TakeExpired(absl::Time now);

 private:
  struct Timer {
    int local_rank = 0;
    absl::Time deadline;
    int signal = 0;
  };

  std::map<std::pair<int64_t, std::string>, Timer> timers_;  // by process and name
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_TIMERS_WORKER_TIMERS_H_
