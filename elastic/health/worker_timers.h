// Timers that workers set for themselves, and whose end is theirs: torch.distributed.elastic.timer
// in its file-based form. Pure: the time is told, nothing is killed here.
#ifndef DDP_ELASTIC_HEALTH_WORKER_TIMERS_H_
#define DDP_ELASTIC_HEALTH_WORKER_TIMERS_H_

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

// One line that a worker writes into the named pipe, a JSON object:
//   version           1
//   pid               of the process that set the timer
//   scope_id          its name there
//   expiration_time   seconds since 1970 by the host's clock; negative: the timer is released
//   signal            for the process whose timer runs out; not positive: none
struct TimerRequest {
  static constexpr size_t kMaxBytes = 4096;  // what a pipe takes at once

  int64_t pid = 0;
  std::string scope;
  double expiration_unix_s = 0;
  int signal = 0;

  bool is_release() const { return expiration_unix_s < 0; }
};

// kInvalidArgument: it is no such object, or of another version.
absl::StatusOr<TimerRequest> ParseTimerRequest(const std::string& line);

// The timers that run. Thread-compatible.
class WorkerTimers {
 public:
  // More are not kept: a worker must not make us hold what it likes.
  static constexpr size_t kMaxTimers = 65536;

  struct Expired {
    int local_rank = 0;
    std::string scope;
    int signal = 0;
  };

  // `local_rank`'s process `request.pid` sets or releases a timer, which ends at `deadline`. A
  // timer that is there is set anew. kResourceExhausted: there are kMaxTimers.
  absl::Status Apply(int local_rank, const TimerRequest& request, absl::Time deadline);

  // The worker has ended, and its timers with it.
  void Forget(int local_rank);

  // The first that ends; infinite: none runs.
  absl::Time next_deadline() const;

  // At most one for each worker, the one that ended first among those that have a signal. All
  // timers of a process of which one has ended are gone then.
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

#endif  // DDP_ELASTIC_HEALTH_WORKER_TIMERS_H_
