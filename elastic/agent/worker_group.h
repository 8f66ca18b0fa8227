#ifndef DDP_ELASTIC_AGENT_WORKER_GROUP_H_
#define DDP_ELASTIC_AGENT_WORKER_GROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/task_thread.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/event_log.h"
#include "elastic/agent/launch_config.h"
#include "elastic/agent/node_status_tracker.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/agent/timer_pipe.h"
#include "elastic/health/hang_detector.h"
#include "elastic/health/health_page.h"
#include "elastic/health/straggler_detector.h"
#include "elastic/health/worker_timers.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// The worker processes of this node, a generation at a time: starts them, watches their ends and
// their health pages, stops them.
//
// The pages are looked at by a timer: often until every worker has done its first step, then every
// `kLookPeriod`. What is seen there goes into the event log and the status, and into the heartbeat
// (Report).
//
// On the thread of the event loop.
class WorkerGroup {
 public:
  // Not owned; must outlive the group.
  struct Dependencies {
    EventLoop* event_loop = nullptr;
    ProcessSpawner* spawner = nullptr;
    const Clock* clock = nullptr;
    EventLog* event_log = nullptr;
    NodeStatusTracker* status = nullptr;
    std::function<void(const std::string& line)> say;  // see Agent::Dependencies
    TaskThread* files = nullptr;                       // as well
  };

  // WorkersStartedEvent, WorkerExitedEvent, WorkerHungEvent and StraysGoneEvent, from the event
  // loop or from within the call that asked for it.
  using Post = std::function<void(AgentEvent)>;

  static constexpr absl::Duration kLookPeriod = absl::Milliseconds(250);

  // How long the end of a worker that failed waits for its error file, which may be on a mount that
  // has stalled. Without it the worker counts as one that failed by itself.
  static constexpr absl::Duration kErrorFileTimeout = absl::Seconds(1);

  // From when on a start is called slow.
  static constexpr absl::Duration kSlowStart = absl::Seconds(10);

  // `config` must outlive the group.
  WorkerGroup(const LaunchConfig& config, Dependencies dependencies, Post post);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // Starts the workers of `round` in the order of their local ranks, up to the first that cannot be
  // started or that is signalled before; posts WorkersStartedEvent then. None of an earlier round
  // may run.
  void Start(const Round& round);

  // Makes LaunchConfig::timer_file, where it is named, and watches over the timers of workers from
  // now on: one that lets a timer run out gets the signal that it had asked for. Errors: those of
  // TimerPipe::Open.
  absl::Status ServeTimers();

  // Unknown local ranks and those that have ended are skipped, here and below.
  void Signal(int signal, const std::vector<int>& local_ranks);

  // See StopWorkersAction. From now on no hangs are looked for.
  void Stop(const StopWorkersAction& stop);

  // No worker runs any more: kills what they left behind, stops looking. Posts StraysGoneEvent.
  void KillStrays();

  // Looks at all pages now. `after_look` is called after every look, this one included.
  void Look();
  void AfterLook(std::function<void()> after_look) { after_look_ = std::move(after_look); }

  // The job's median of what NodeReport::busy_us says; -1: unknown.
  void SetMedianBusy(int64_t median_busy_us) { median_busy_us_ = median_busy_us; }

  // For the heartbeat, as of the last look.
  NodeReport Report();

  // Whether a worker of the generation has spoken through its page: then its silence means
  // something.
  bool progress_known() const { return progress_known_; }

 private:
  struct Worker {
    int rank = 0;
    pid_t pid = 0;
    HealthPage page;
    bool first_step_seen = false;
    bool signalled_to_stop = false;  // because it does not look at should_stop()
    std::string timer_ran_out;       // its name
  };

  // The start that is under way.
  struct Launch {
    Round round;
    std::vector<int> started;  // local ranks
    std::vector<EventLog::Worker> for_log;
    std::optional<HealthPage> page;  // of the next one
    EventLoop::TimerId slow_timer = 0;
  };

  void StartNext();
  void OnStarted(int local_rank, const absl::StatusOr<pid_t>& pid);
  void EndStart(const absl::Status& status);
  void CutStart(const std::vector<int>& local_ranks);
  void SayStartIsSlow();
  absl::StatusOr<WorkerSpec> MakeSpec(const Round& round, int local_rank);
  void OnExit(uint64_t generation, int local_rank, const ExitStatus& status);
  void PostFailure(WorkerExitedEvent event);
  std::optional<int> FindWorker(pid_t pid) const;
  void OnTimerExpired(const WorkerTimers::Expired& expired);
  void LookAt(int local_rank, Worker& worker);
  void LogFirstStep(Worker& worker, const HealthPage::Snapshot& snapshot);
  void LookForHang();
  void LookForStragglers();
  void ScheduleLook();
  int64_t NextCommonStep() const;

  const LaunchConfig& config_;
  EventLoop& loop_;
  ProcessSpawner& spawner_;
  const Clock& clock_;
  EventLog& event_log_;
  NodeStatusTracker& status_;
  const std::function<void(const std::string&)> say_;
  TaskThread* const files_;
  const Post post_;
  const std::map<std::string, std::string> inherited_environment_;
  std::function<void()> after_look_;

  // Of the current generation.
  uint64_t generation_ = 0;
  std::optional<Launch> launch_;
  std::map<int, Worker> workers_;  // by local rank; those that run
  int64_t started_ns_ = 0;
  bool looks_for_hangs_ = false;
  bool progress_known_ = false;
  int64_t median_busy_us_ = -1;
  HangDetector hangs_;
  StragglerDetector stragglers_;
  std::unique_ptr<TimerPipe> timers_;
  EventLoop::TimerId look_timer_ = 0;
  absl::Duration look_pause_;

  bool told_of_omp_num_threads_ = false;

  // Expires with the group: for calls that come from elsewhere.
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_GROUP_H_
