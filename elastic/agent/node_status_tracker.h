#ifndef DDP_ELASTIC_AGENT_NODE_STATUS_TRACKER_H_
#define DDP_ELASTIC_AGENT_NODE_STATUS_TRACKER_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "elastic/agent/job_status.h"
#include "elastic/job/job_spec.h"

namespace ddp::elastic {

// Tracks the state of the agent's own node. Produces the node's row in the rendezvous (for `ddprun
// status`) and its metrics. Pure: no clock, no I/O. ddprun owns it.
//
//   NodeStatusTracker tracker({.job = ..., .host = ..., .agent_pid = getpid()});
//   on a round:       tracker.BeginGeneration({...});
//   worker started:   tracker.WorkerStarted(local_rank, rank, pid, now);
//   worker's end:     tracker.WorkerEnded(local_rank);
//   each heartbeat:   for each worker: tracker.Observe(local_rank, {step, stamp, phase}, now);
//                     report.step = tracker.highest_step();
//                     report.steps_per_second = max(0, tracker.StepsPerSecond(now));
//                     report.row = tracker.RowText(now);
//   a scrape:         MetricsServer::Listen(loop, {.port = port},
//                                           [&] { return tracker.Status(clock.Now()); })
//
// `now` must come from a Clock that is CLOCK_MONOTONIC, as the pages' stamps do. Thread-compatible.
class NodeStatusTracker {
 public:
  // Constant while the agent lives.
  struct Identity {
    JobSpec job;
    int64_t instance = 0;  // number of the run id's instance; 0: not known
    std::string host;
    pid_t agent_pid = 0;
  };

  struct Generation {
    uint64_t number = 0;
    std::string nonce;
    std::string reason;  // why the previous generation ended
    int restarts = 0;    // charged to the job so far
    int group_rank = 0;
    int nodes = 1;
    int world_size = 1;
  };

  // The part of a worker's HealthPage that this class uses.
  struct Progress {
    int64_t step = -1;                // last commit of this generation; -1: none yet
    int64_t commit_monotonic_ns = 0;  // the worker's stamp; impossible values are replaced
    std::string phase;                // current phase; empty: not reported
    int64_t failed_saves = 0;
    int64_t failed_saves_in_a_row = 0;
    std::string save_error;  // of the newest failed save
  };

  explicit NodeStatusTracker(Identity identity);

  // Sets the agent's state, for people: "joining", "running", "stopping", "draining", ...
  void SetState(std::string state) { state_ = std::move(state); }

  // Clears the workers and stragglers of the last generation.
  void BeginGeneration(Generation generation);
  void WorkerStarted(int local_rank, int rank, pid_t pid, absl::Time now);
  void WorkerEnded(int local_rank);
  void Observe(int local_rank, const Progress& progress, absl::Time now);

  // Sets RankRow::straggler_factor of a worker; -1: no longer known.
  void SetStragglerFactor(int local_rank, double factor);

  void StoreOutOfReach();
  void StoreBack() { store_in_reach_ = true; }
  void WorkerHung() { ++hangs_; }

  // Returns the highest step that a local rank has committed in this generation; -1: none.
  int64_t highest_step() const;

  // Returns the speed of the fastest local rank; -1 while no rank has committed two steps. The
  // speed of a stalled rank falls with time.
  double StepsPerSecond(absl::Time now) const;

  NodeRow Row(absl::Time now) const;

  // Returns the row as text. To spare the store, makes a new text only when the generation, the
  // agent's state or a worker's pid has changed, or NodeRowPeriodSeconds() has passed.
  std::string RowText(absl::Time now);

  // Returns the job as this node knows it, for metrics: `nodes` holds this node only.
  JobStatus Status(absl::Time now) const;

 private:
  struct Commit {
    int64_t step = 0;
    absl::Time at;
  };
  struct Worker {
    int rank = 0;
    pid_t pid = 0;
    absl::Time started;
    std::string phase;
    double straggler_factor = -1;
    int64_t failed_saves = 0;
    int64_t failed_saves_in_a_row = 0;
    std::deque<Commit> commits;  // the last commits, thinned out; the newest is exact
  };

  int64_t FailedSaves() const;
  static double Speed(const Worker& worker, absl::Time now);
  std::string Shape() const;

  const Identity identity_;
  std::string state_;
  Generation generation_;
  std::map<int, Worker> workers_;  // by local rank
  bool store_in_reach_ = true;
  uint64_t store_outages_ = 0;
  uint64_t hangs_ = 0;
  int64_t failed_saves_before_ = 0;  // in earlier generations
  std::string save_error_;

  std::string row_text_;
  std::string row_shape_;  // the part of the row whose change is sent at once
  absl::Time row_made_ = absl::InfinitePast();
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_NODE_STATUS_TRACKER_H_
