#ifndef DDP_ELASTIC_AGENT_WORKER_GROUP_H_
#define DDP_ELASTIC_AGENT_WORKER_GROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/process/killed_processes.h"
#include "base/process/oom_kills.h"
#include "base/task_thread.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/event_log.h"
#include "elastic/agent/launch_config.h"
#include "elastic/agent/node_status_tracker.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/health/hang_detector.h"
#include "elastic/health/health_page.h"
#include "elastic/health/straggler_detector.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "elastic/timers/timer_pipe.h"
#include "elastic/timers/worker_timers.h"

namespace ddp::elastic {

// The worker processes of this node, one generation at a time: starts them, watches their ends and
// health pages, and stops them. Agent owns it. The destructor stops no worker that runs.
//
// A timer reads the pages. The pause between reads grows from 20 ms to `kLookPeriod`; it is
// `kLookPeriod` as soon as every worker has done its first step. The findings go into the event
// log, the status and the heartbeat (Report). A hang is also posted as an event.
//
// Thread: the event loop's.
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
    TaskThread* files = nullptr;                       // see Agent::Dependencies
    OomKills* oom_kills = nullptr;                     // see Agent::Dependencies
  };

  // Receives WorkersStartedEvent, WorkerExitedEvent, WorkerHungEvent and StraysGoneEvent. Called
  // from the event loop, or from within the call that caused the event.
  using Post = std::function<void(AgentEvent)>;

  static constexpr absl::Duration kLookPeriod = absl::Milliseconds(250);

  // Time that the exit of a failed worker waits for its error file, which may be on a stalled
  // mount. Without the file the worker does not count as a victim.
  static constexpr absl::Duration kErrorFileTimeout = absl::Seconds(1);

  // A start that takes longer is reported as slow.
  static constexpr absl::Duration kSlowStart = absl::Seconds(10);

  // `config` must outlive the group.
  WorkerGroup(const LaunchConfig& config, Dependencies dependencies, Post post);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // Starts the workers of `round` in the order of their local ranks, then posts
  // WorkersStartedEvent. Ends at the first worker that cannot be started, or that gets a signal
  // before its start. No worker of an earlier round may run.
  void Start(const Round& round);

  // Makes LaunchConfig::timer_file, if set, and watches the workers' timers from now on. A worker
  // whose timer runs out gets the signal that the timer names. Errors: those of TimerPipe::Open.
  absl::Status ServeTimers();

  // Sends `signal` to these workers and stops the search for hangs. Skips unknown local ranks and
  // workers that have ended.
  void Signal(int signal, const std::vector<int>& local_ranks);

  // Stops all workers by SIGSTOP, also those that start from now on, until Continue(). Signal() and
  // Stop() let the present ones go on, to their end. No worker is hung or slow meanwhile. Does
  // nothing after Stop(): they are about to save.
  void Hold();
  void Continue();

  // Carries out a StopWorkersAction, with the same skips. Stops the search for hangs.
  void Stop(const StopWorkersAction& stop);

  // Kills processes that the workers left behind, and stops reading pages. Posts StraysGoneEvent.
  // Requires that no worker runs.
  void KillStrays();

  // Reads all pages now. AfterLook sets a callback that runs after every look, this one included.
  void Look();
  void AfterLook(std::function<void()> after_look) { after_look_ = std::move(after_look); }

  // Sets the job's median of NodeReport::busy_us; -1: unknown.
  void SetMedianBusy(int64_t median_busy_us) { median_busy_us_ = median_busy_us; }

  // Sets the job's rank that works while others may wait for it, of this node or another one.
  void SetAtWork(const std::optional<RankAtWork>& rank);

  // Returns the content of the next heartbeat, as of the last look.
  NodeReport Report();

  // Returns true when a worker that was asked to stop has got on since the last call: by a step up
  // to the common one, or in a phase that is not part of a step (a save).
  bool TakeProgress() { return std::exchange(got_on_, false); }

  absl::Duration longest_step() const { return hangs_.longest_step(); }

  // Returns true when a worker of this generation has attached to its page: only then does the page
  // show progress.
  bool progress_known() const { return progress_known_; }

 private:
  // Changes when a worker gets nearer to its end in order.
  struct StopProgress {
    int64_t step = -1;                     // at most the one to stop after
    int64_t phase_start_monotonic_ns = 0;  // of a phase that is not part of a step
    bool stopped_as_asked = false;
    bool operator==(const StopProgress&) const = default;
  };

  struct Worker {
    int rank = 0;
    pid_t pid = 0;
    HealthPage page;
    bool first_step_seen = false;
    int64_t max_world_size = 0;                        // as in HealthPage::Snapshot
    StopProgress stop_progress;                        // as of the last look
    absl::Time sleeps_since = absl::InfiniteFuture();  // uninterruptibly
    bool signalled_to_stop = false;  // by signal, as it does not poll should_stop()
    std::string timer_ran_out;       // name of its timer that ran out; empty: none
  };

  // The start in progress.
  struct Launch {
    Round round;
    std::vector<int> started;  // local ranks
    std::vector<EventLog::Worker> for_log;
    std::optional<HealthPage> page;  // for the next worker
    EventLoop::TimerId slow_timer = 0;
  };

  void StartNext();
  void OnStarted(int local_rank, const absl::StatusOr<pid_t>& pid);
  void EndStart(const absl::Status& status);
  void CutStart(const std::vector<int>& local_ranks);
  void ContinueToStop();
  void SayStartIsSlow();
  absl::StatusOr<WorkerSpec> MakeSpec(const Round& round, int local_rank);
  void OnExit(uint64_t generation, int local_rank, ExitStatus status);
  void PostFailure(WorkerExitedEvent event);
  std::optional<int> FindWorker(pid_t pid) const;
  void OnTimerExpired(const WorkerTimers::Expired& expired);
  void LookAt(int local_rank, Worker& worker);
  void LookForStopProgress(Worker& worker, const HealthPage::Snapshot& snapshot);
  void LogFirstStep(Worker& worker, const HealthPage::Snapshot& snapshot);
  void WarnOfHang();
  void WarnOfLongWait();
  bool IsHeld(const Worker& worker, const HangDetector::Hang& hang);
  void LookForHang();
  void LookForStuck();
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
  OomKills* const oom_kills_;
  const Post post_;
  const std::map<std::string, std::string> inherited_environment_;
  std::function<void()> after_look_;

  // State of the current generation.
  uint64_t generation_ = 0;
  std::optional<Launch> launch_;
  std::map<int, Worker> workers_;  // running workers by local rank
  int64_t started_ns_ = 0;
  bool looks_for_hangs_ = false;
  bool progress_known_ = false;
  std::optional<int64_t> stop_at_step_;  // of the last request to stop
  bool got_on_ = false;                  // see TakeProgress
  KilledProcesses killed_;               // workers that got SIGKILL
  int64_t median_busy_us_ = -1;
  HangDetector hangs_;
  std::optional<RankAtWork> at_work_elsewhere_;
  // The stalls that lines were printed of, by local rank and step.
  std::optional<std::pair<int, int64_t>> warned_of_hang_;
  std::optional<std::pair<int, int64_t>> warned_of_held_;
  StragglerDetector stragglers_;
  std::unique_ptr<TimerPipe> timers_;
  EventLoop::TimerId look_timer_ = 0;
  std::optional<absl::Time> held_since_;  // over generations
  absl::Duration look_pause_;

  bool warned_of_omp_num_threads_ = false;

  // Expires with the group; guards callbacks that may arrive later.
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_GROUP_H_
