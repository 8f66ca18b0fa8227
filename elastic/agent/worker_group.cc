// Length: all parts work on one table of workers.

#include "elastic/agent/worker_group.h"

#include <signal.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/process/process_state.h"
#include "elastic/agent/worker_environment_builder.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/error_file/error_record.h"

namespace ddp::elastic {
namespace {

// The pause between looks grows from this to kLookPeriod.
constexpr absl::Duration kLookPauseMin = absl::Milliseconds(20);

// The time from a look at the pages until every worker of this node can have seen a request to
// stop.
constexpr double kTellSeconds = 0.05;

// Adds the content of the worker's error file to the event.
void AddRecord(const std::string& error_file, WorkerExitedEvent& event) {
  const absl::StatusOr<ErrorRecord> record = ReadErrorRecord(error_file);
  if (!record.ok()) return;
  event.is_victim = record->is_victim;
  event.said_at = record->time;
}

}  // namespace

WorkerGroup::WorkerGroup(const LaunchConfig& config, Dependencies dependencies, Post post)
    : config_(config),
      loop_(*dependencies.event_loop),
      spawner_(*dependencies.spawner),
      clock_(*dependencies.clock),
      event_log_(*dependencies.event_log),
      status_(*dependencies.status),
      say_(std::move(dependencies.say)),
      files_(dependencies.files),
      oom_kills_(dependencies.oom_kills),
      post_(std::move(post)),
      inherited_environment_(InheritedEnvironment()),
      hangs_(config.job.hangs),
      stragglers_(config.job.stragglers) {}

WorkerGroup::~WorkerGroup() {
  loop_.CancelTimer(look_timer_);
  if (!launch_.has_value()) return;
  loop_.CancelTimer(launch_->slow_timer);
  spawner_.CancelStart();
}

absl::Status WorkerGroup::ServeTimers() {
  if (config_.timer_file.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<TimerPipe>> pipe = TimerPipe::Open(
      config_.timer_file,
      {.event_loop = &loop_,
       .clock = &clock_,
       .find_worker = [this](pid_t pid) { return FindWorker(pid); },
       .on_expired = [this](const WorkerTimers::Expired& expired) { OnTimerExpired(expired); },
       .say = say_});
  if (!pipe.ok()) return pipe.status();
  timers_ = *std::move(pipe);
  return absl::OkStatus();
}

std::optional<int> WorkerGroup::FindWorker(pid_t pid) const {
  const auto found = std::find_if(workers_.begin(), workers_.end(),
                                  [pid](const auto& entry) { return entry.second.pid == pid; });
  return found == workers_.end() ? std::nullopt : std::optional<int>(found->first);
}

void WorkerGroup::OnTimerExpired(const WorkerTimers::Expired& expired) {
  const auto found = workers_.find(expired.local_rank);
  if (found == workers_.end() || held_since_.has_value()) return;
  Worker& worker = found->second;
  worker.timer_ran_out = expired.scope;
  say_(absl::StrCat("rank ", worker.rank, " (pid ", worker.pid, ") let its timer '", expired.scope,
                    "' run out: sending ", SignalName(expired.signal)));
  spawner_.Signal(worker.pid, expired.signal);
}

void WorkerGroup::Start(const Round& round) {
  if (!std::exchange(warned_of_omp_num_threads_, true) &&
      SetsOmpNumThreads(config_, inherited_environment_)) {
    say_(absl::StrCat("OMP_NUM_THREADS is not set: each of the ", config_.nproc_per_node,
                      " workers gets 1, so that they do not crowd each other out"));
  }
  workers_.clear();
  if (oom_kills_ != nullptr) oom_kills_->Forget();
  generation_ = round.generation.number;
  started_ns_ = MonotonicNanoseconds();
  progress_known_ = false;
  stop_at_step_.reset();
  got_on_ = false;
  Launch launch;
  launch.round = round;
  launch_ = std::move(launch);
  launch_->slow_timer = loop_.AddTimer(kSlowStart, [this] { SayStartIsSlow(); });
  StartNext();
}

void WorkerGroup::StartNext() {
  const int local_rank = static_cast<int>(launch_->started.size());
  if (local_rank == config_.nproc_per_node) return EndStart(absl::OkStatus());
  const absl::StatusOr<WorkerSpec> spec = MakeSpec(launch_->round, local_rank);
  if (!spec.ok()) return EndStart(spec.status());
  spawner_.Spawn(
      *spec, [this, local_rank](const absl::StatusOr<pid_t>& pid) { OnStarted(local_rank, pid); },
      [this, generation = generation_, local_rank](pid_t, const ExitStatus& status) {
        OnExit(generation, local_rank, status);
      });
}

void WorkerGroup::OnStarted(int local_rank, const absl::StatusOr<pid_t>& pid) {
  if (!pid.ok()) return EndStart(pid.status());
  const int rank = launch_->round.placement.first_rank + local_rank;
  workers_.emplace(local_rank,
                   Worker{.rank = rank, .pid = *pid, .page = *std::move(launch_->page)});
  if (held_since_.has_value()) spawner_.Signal(*pid, SIGSTOP);
  launch_->started.push_back(local_rank);
  launch_->for_log.push_back({.rank = rank, .pid = *pid});
  status_.WorkerStarted(local_rank, rank, *pid, clock_.Now());
  StartNext();
}

void WorkerGroup::EndStart(const absl::Status& status) {
  const Launch launch = *std::exchange(launch_, std::nullopt);
  loop_.CancelTimer(launch.slow_timer);
  const bool all = launch.started.size() == static_cast<size_t>(config_.nproc_per_node);
  if (all) {
    event_log_.GenerationStarted(generation_, launch.for_log);
    look_pause_ = kLookPauseMin;
    looks_for_hangs_ = true;
    hangs_.Begin(clock_.Now(), launch.round.placement.group_world_size);
    stragglers_.Begin(clock_.Now());
    Look();
  }
  post_(WorkersStartedEvent{.status = status, .started = launch.started, .wall_time = absl::Now()});
}

// A signal to a worker that is not started yet ends the start of this and all later workers.
void WorkerGroup::CutStart(const std::vector<int>& local_ranks) {
  if (!launch_.has_value()) return;
  const auto started = static_cast<int>(launch_->started.size());
  const bool cut = std::any_of(local_ranks.begin(), local_ranks.end(),
                               [started](int local_rank) { return local_rank >= started; });
  if (!cut) return;
  spawner_.CancelStart();
  EndStart(absl::OkStatus());
}

void WorkerGroup::SayStartIsSlow() {
  launch_->slow_timer = 0;
  const auto next = static_cast<int>(launch_->started.size());
  say_(absl::StrCat("rank ", launch_->round.placement.first_rank + next,
                    " is still being started after ", absl::FormatDuration(kSlowStart),
                    ": its log folder or its program ", config_.command[0],
                    " may be on a mount that has stalled"));
}

absl::StatusOr<WorkerSpec> WorkerGroup::MakeSpec(const Round& round, int local_rank) {
  absl::StatusOr<HealthPage> page = HealthPage::Create();
  if (!page.ok()) return page.status();
  page->BeginGeneration(generation_);
  WorkerSpec spec;
  spec.local_rank = local_rank;
  spec.rank = round.placement.first_rank + local_rank;
  spec.attempt = round.restarts;
  spec.generation = generation_;
  spec.role = config_.job.role;
  for (const std::string& argument : config_.command) {
    spec.argv.push_back(SubstituteLocalRank(argument, local_rank));
  }
  spec.environment =
      BuildWorkerEnvironment(config_, round, local_rank, page->fd(), inherited_environment_);
  spec.inherited_fds = {page->fd()};
  launch_->page = *std::move(page);
  return spec;
}

void WorkerGroup::OnExit(uint64_t generation, int local_rank, ExitStatus status) {
  const auto found = workers_.find(local_rank);
  if (generation != generation_ || found == workers_.end()) return;
  // Shells report the SIGKILL of a child as exit code 137.
  const bool sent = killed_.Remove(found->second.pid) || !found->second.timer_ran_out.empty();
  if (oom_kills_ != nullptr && !sent && ShellExitCode(status) == 128 + SIGKILL) {
    status.cause = oom_kills_->Explain();
  }
  LookAt(local_rank, found->second);
  WorkerExitedEvent event = {.local_rank = local_rank,
                             .pid = found->second.pid,
                             .status = status,
                             .wall_time = absl::Now()};
  // A program may handle the signal, save its state and exit with 0: its work is not done then.
  const HealthPage::Snapshot page = found->second.page.Read();
  event.stopped_as_asked = found->second.signalled_to_stop || page.stopped_as_asked;
  event.is_unprompted = page.stop_aware && !found->second.signalled_to_stop;
  if (const std::string& timer = found->second.timer_ran_out; !timer.empty()) {
    event.instead = absl::StrCat("let its timer '", timer, "' run out");
  }
  event_log_.WorkerExited(generation, {.rank = found->second.rank, .pid = event.pid}, status);
  workers_.erase(found);
  status_.WorkerEnded(local_rank);
  hangs_.Forget(local_rank);
  if (timers_ != nullptr) timers_->Forget(local_rank);
  if (status.succeeded()) return post_(std::move(event));
  PostFailure(std::move(event));
}

// Reads the error file before it posts the event, within kErrorFileTimeout.
void WorkerGroup::PostFailure(WorkerExitedEvent event) {
  const std::string path = event.status.error_file;
  if (files_ == nullptr || path.empty()) {
    AddRecord(path, event);
    return post_(std::move(event));
  }
  struct Pending {
    WorkerExitedEvent event;
    EventLoop::TimerId timer = 0;
    bool posted = false;
  };
  const auto pending = std::make_shared<Pending>(Pending{.event = event});
  const auto post = [this, pending,
                     alive = std::weak_ptr<const bool>(alive_)](const WorkerExitedEvent& what) {
    if (alive.expired() || std::exchange(pending->posted, true)) return;
    loop_.CancelTimer(pending->timer);
    post_(what);
  };
  pending->timer = loop_.AddTimer(kErrorFileTimeout, [post, pending] { post(pending->event); });
  const auto read = std::make_shared<WorkerExitedEvent>(std::move(event));
  files_->Run([read, path] { AddRecord(path, *read); }, [read, post] { post(*read); });
}

void WorkerGroup::Signal(int signal, const std::vector<int>& local_ranks) {
  looks_for_hangs_ = false;
  for (int local_rank : local_ranks) {
    const auto found = workers_.find(local_rank);
    if (found == workers_.end()) continue;
    if (signal == SIGKILL)
      killed_.Add(found->second.pid, absl::StrCat("rank ", found->second.rank));
    spawner_.Signal(found->second.pid, signal);
  }
  ContinueToStop();
  CutStart(local_ranks);
}

void WorkerGroup::Hold() {
  if (held_since_.has_value() || stop_at_step_.has_value()) return;
  held_since_ = clock_.Now();
  for (const auto& [local_rank, worker] : workers_) spawner_.Signal(worker.pid, SIGSTOP);
  say_(
      "received SIGTSTP: the workers are stopped until SIGCONT (fg). The agent renews the node's "
      "lease meanwhile. A collective fails when it lasts longer than its timeout (30 minutes "
      "unless the program sets another)");
}

void WorkerGroup::Continue() {
  if (!held_since_.has_value()) return;
  for (const auto& [local_rank, worker] : workers_) spawner_.Signal(worker.pid, SIGCONT);
  const absl::Duration held = clock_.Now() - *std::exchange(held_since_, std::nullopt);
  hangs_.Excuse(clock_.Now());
  say_(absl::StrCat("the workers go on after ",
                    absl::FormatDuration(absl::Trunc(held, absl::Milliseconds(100)))));
}

// Held workers go on, to save and to end. Those of the next generation are held again.
void WorkerGroup::ContinueToStop() {
  if (!held_since_.has_value()) return;
  for (const auto& [local_rank, worker] : workers_) spawner_.Signal(worker.pid, SIGCONT);
}

void WorkerGroup::Stop(const StopWorkersAction& stop) {
  Look();
  looks_for_hangs_ = false;
  const int64_t step = stop.stop_at_step.value_or(NextCommonStep());
  stop_at_step_ = step;
  for (int local_rank : stop.local_ranks) {
    const auto found = workers_.find(local_rank);
    if (found == workers_.end()) continue;
    Worker& worker = found->second;
    if (worker.page.Read().stop_aware) {
      worker.page.RequestStop(step);
    } else if (!worker.signalled_to_stop) {
      worker.signalled_to_stop = true;
      spawner_.Signal(worker.pid, stop.signal);
    }
  }
  ContinueToStop();
  CutStart(stop.local_ranks);
}

// Returns a step that no worker of this node has begun when all of them have seen the request.
int64_t WorkerGroup::NextCommonStep() const {
  const int64_t highest = status_.highest_step();
  if (highest < 0) return HealthPage::kStopAtOnce;
  const double speed = std::clamp(status_.StepsPerSecond(clock_.Now()), 0.0, 1e6);
  return highest + 2 + static_cast<int64_t>(std::ceil(speed * kTellSeconds));
}

void WorkerGroup::KillStrays() {
  loop_.CancelTimer(std::exchange(look_timer_, 0));
  spawner_.KillStrays([this, alive = std::weak_ptr<const bool>(alive_)] {
    if (!alive.expired()) post_(StraysGoneEvent{});
  });
}

void WorkerGroup::Look() {
  bool all_first_steps_seen = true;
  for (auto& [local_rank, worker] : workers_) {
    LookAt(local_rank, worker);
    all_first_steps_seen &= worker.first_step_seen;
  }
  LookForStuck();
  if (looks_for_hangs_ && !held_since_.has_value()) {
    LookForStragglers();
    LookForHang();
  }
  if (auto finding = killed_.Look()) post_(EndingEvent{finding->what, finding->progress});
  if (after_look_) after_look_();
  look_pause_ = all_first_steps_seen ? kLookPeriod : std::min(look_pause_ * 5 / 4, kLookPeriod);
  ScheduleLook();
}

void WorkerGroup::ScheduleLook() {
  loop_.CancelTimer(std::exchange(look_timer_, 0));
  if (workers_.empty()) return;
  look_timer_ = loop_.AddTimer(look_pause_, [this] {
    look_timer_ = 0;
    Look();
  });
}

void WorkerGroup::LookAt(int local_rank, Worker& worker) {
  const HealthPage::Snapshot snapshot = worker.page.Read();
  if (snapshot.generation != generation_) return;
  progress_known_ |= snapshot.worker != HealthPage::Worker::kNotAttached;
  LogFirstStep(worker, snapshot);
  LookForStopProgress(worker, snapshot);
  worker.max_world_size = snapshot.max_world_size;
  NodeStatusTracker::Progress progress;
  if (snapshot.has_step) {
    progress.step = snapshot.step;
    progress.commit_monotonic_ns = snapshot.last_commit_monotonic_ns;
  }
  if (snapshot.worker != HealthPage::Worker::kNotAttached) {
    progress.phase = std::string(PhaseName(snapshot.phase));
  }
  progress.failed_saves = snapshot.failed_saves;
  progress.failed_saves_in_a_row = snapshot.failed_saves_in_a_row;
  progress.save_error = snapshot.save_error;
  status_.Observe(local_rank, progress, clock_.Now());
  hangs_.Observe(local_rank, snapshot, clock_.Now());
  stragglers_.Observe(local_rank, snapshot, clock_.Now());
}

void WorkerGroup::LookForStopProgress(Worker& worker, const HealthPage::Snapshot& snapshot) {
  StopProgress progress;
  if (snapshot.has_step && !worker.signalled_to_stop) {
    progress.step = std::min(snapshot.step, stop_at_step_.value_or(snapshot.step));
  }
  if (!IsPartOfStep(snapshot.phase)) {
    progress.phase_start_monotonic_ns = snapshot.phase_start_monotonic_ns;
  }
  progress.stopped_as_asked = snapshot.stopped_as_asked;
  if (std::exchange(worker.stop_progress, progress) == progress) return;
  got_on_ |= stop_at_step_.has_value();
}

void WorkerGroup::LogFirstStep(Worker& worker, const HealthPage::Snapshot& snapshot) {
  if (worker.first_step_seen || !snapshot.has_step) return;
  worker.first_step_seen = true;
  // The worker writes its page: ignore a stamp that cannot be true.
  const int64_t stamp_ns = snapshot.first_commit_monotonic_ns;
  if (stamp_ns < started_ns_ || stamp_ns > MonotonicNanoseconds()) return;
  event_log_.FirstStepDone(
      generation_, {.rank = worker.rank, .step = snapshot.first_step, .monotonic_ns = stamp_ns});
}

void WorkerGroup::SetAtWork(const std::optional<RankAtWork>& rank) {
  const auto is_it = [&rank](const auto& entry) { return entry.second.rank == rank->rank; };
  const bool is_elsewhere =
      rank.has_value() && std::none_of(workers_.begin(), workers_.end(), is_it);
  at_work_elsewhere_ = is_elsewhere ? rank : std::nullopt;
  hangs_.SetOthersAtWork(is_elsewhere, clock_.Now());
}

// Says once for whom a rank waits that is not ended, because another node watches the cause.
void WorkerGroup::WarnOfLongWait() {
  const std::optional<HangDetector::Hang> wait = hangs_.FindLongWait(clock_.Now());
  if (!wait.has_value()) return;
  const auto found = workers_.find(wait->local_rank);
  if (found == workers_.end() || warned_of_hang_ == std::pair(wait->local_rank, wait->step)) return;
  warned_of_hang_ = std::pair(wait->local_rank, wait->step);
  const RankAtWork& cause = *at_work_elsewhere_;
  say_(absl::StrCat("rank ", found->second.rank, " waits for rank ", cause.rank, " of node ",
                    cause.host, ", which is in ", cause.phase, " and has made no step for ",
                    absl::FormatDuration(absl::Trunc(cause.stalled_for, absl::Seconds(1))),
                    "; its own node watches it"));
}

// Says once, halfway, what will become of a rank that makes no step.
void WorkerGroup::WarnOfHang() {
  const std::optional<HangDetector::Hang> hang = hangs_.Check(clock_.Now(), /*share=*/0.5);
  if (!hang.has_value()) return WarnOfLongWait();
  const auto found = workers_.find(hang->local_rank);
  if (found == workers_.end() || warned_of_hang_ == std::pair(hang->local_rank, hang->step)) return;
  warned_of_hang_ = std::pair(hang->local_rank, hang->step);
  say_(absl::StrCat("rank ", found->second.rank, " ", DescribeHang(*hang),
                    "; it is ended as hung when it makes none for ",
                    absl::FormatDuration(absl::Trunc(hang->limit, absl::Seconds(1))),
                    " (--hang-timeout sets the least time; 0: never)"));
}

// A process that is stopped, or that the kernel lets wait, is not ended: a debugger or Ctrl-Z holds
// it, and SIGKILL would not end an uninterruptible sleep.
bool WorkerGroup::IsHeld(const Worker& worker, const HangDetector::Hang& hang) {
  const char state = ProcessState(worker.pid);
  const char* const why =
      state == 'T'   ? "is stopped by a signal (state T)"
      : state == 't' ? "is stopped by a debugger (state t)"
      : state == 'D' ? "is in uninterruptible sleep (state D): it waits for a disk, a network file "
                       "system or a device"
                     : nullptr;
  if (why == nullptr) return false;
  hangs_.Excuse(clock_.Now());
  const std::pair stall(hang.local_rank, hang.step);
  if (warned_of_held_ == stall) return true;
  warned_of_held_ = stall;
  say_(absl::StrCat("rank ", worker.rank, " (pid ", worker.pid, ") ", why,
                    ": it makes no step, and is not ended as hung"));
  return true;
}

void WorkerGroup::LookForHang() {
  const std::optional<HangDetector::Hang> hang = hangs_.Check(clock_.Now());
  if (!hang.has_value()) return WarnOfHang();
  const auto found = workers_.find(hang->local_rank);
  if (found == workers_.end() || IsHeld(found->second, *hang)) return;
  looks_for_hangs_ = false;
  status_.WorkerHung();
  event_log_.WorkerHangs(generation_, {.rank = found->second.rank,
                                       .phase = std::string(PhaseName(hang->phase)),
                                       .stalled_for = hang->stalled_for,
                                       .longest_step = hang->longest_step,
                                       .waits_for_peers = hang->waits_for_peers});
  post_(WorkerHungEvent{.local_rank = hang->local_rank,
                        .pid = found->second.pid,
                        .what = DescribeHang(*hang),
                        .wall_time = absl::Now(),
                        .is_victim = hang->waits_for_peers});
}

void WorkerGroup::LookForStuck() {
  const absl::Duration timeout = config_.job.times.uninterruptible_timeout;
  if (timeout <= absl::ZeroDuration()) return;
  const absl::Time now = clock_.Now();
  for (auto& [local_rank, worker] : workers_) {
    worker.sleeps_since = ProcessState(worker.pid) == 'D' ? std::min(worker.sleeps_since, now)
                                                          : absl::InfiniteFuture();
    if (now - worker.sleeps_since < timeout) continue;
    const absl::Duration slept = absl::Trunc(now - worker.sleeps_since, absl::Milliseconds(100));
    return post_(WorkerStuckEvent{
        .local_rank = local_rank,
        .pid = worker.pid,
        .what = absl::StrCat("was in uninterruptible sleep (state D) for ",
                             absl::FormatDuration(slept), " (--uninterruptible-timeout)"),
        .wall_time = absl::Now()});
  }
}

void WorkerGroup::LookForStragglers() {
  for (const auto& straggler : stragglers_.Check(clock_.Now(), median_busy_us_)) {
    const auto found = workers_.find(straggler.local_rank);
    if (found == workers_.end()) continue;
    const int rank = found->second.rank;
    say_(absl::StrCat("rank ", rank, " is slow: it ", DescribeStraggler(straggler)));
    event_log_.WorkerStraggles(generation_, {.rank = rank,
                                             .phase = std::string(PhaseName(straggler.phase)),
                                             .factor = straggler.factor});
  }
  for (const auto& [local_rank, worker] : workers_) status_.SetStragglerFactor(local_rank, -1);
  for (const auto& straggler : stragglers_.stragglers()) {
    status_.SetStragglerFactor(straggler.local_rank, straggler.factor);
  }
}

NodeReport WorkerGroup::Report() {
  const absl::Time now = clock_.Now();
  NodeReport report;
  report.step = status_.highest_step();
  report.steps_per_second = std::max(0.0, status_.StepsPerSecond(now));
  report.busy_us = stragglers_.busy_us();
  for (const auto& [local_rank, worker] : workers_) {
    if (worker.max_world_size == 0) continue;
    report.max_world_size = report.max_world_size == 0
                                ? worker.max_world_size
                                : std::min(report.max_world_size, worker.max_world_size);
  }
  if (const auto work = hangs_.FindAtWork(now); work.has_value()) {
    const auto found = workers_.find(work->local_rank);
    if (found != workers_.end()) {
      report.at_work = RankAtWork{.rank = found->second.rank,
                                  .phase = std::string(PhaseName(work->phase)),
                                  .stalled_for = work->stalled_for};
    }
  }
  if (held_since_.has_value() && !workers_.empty()) {
    report.at_work = RankAtWork{.rank = workers_.begin()->second.rank,
                                .phase = "stopped",
                                .stalled_for = now - *held_since_};
  }
  report.row = status_.RowText(now);
  return report;
}

}  // namespace ddp::elastic
