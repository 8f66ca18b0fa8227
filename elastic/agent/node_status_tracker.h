#ifndef DDP_ELASTIC_AGENT_NODE_STATUS_TRACKER_H_
#define DDP_ELASTIC_AGENT_NODE_STATUS_TRACKER_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "elastic/agent/job_status.h"

namespace ddp::elastic {

// Keeps what an agent knows of its own node, and turns it into what others see: the row in the
// rendezvous (`ddprun status`) and the metrics. Pure: told the time, does no I/O.
//
//   NodeStatusTracker tracker({.run_id = ..., .host = ..., .role = ..., .agent_pid = getpid()});
//   on a round:       tracker.BeginGeneration({...}, now);
//   worker started:   tracker.WorkerStarted(local_rank, rank, pid, now);
//   worker's end:     tracker.WorkerEnded(local_rank);
//   each heartbeat:   for each worker: tracker.Observe(local_rank, {step, stamp, phase}, now);
//                     report.step = tracker.highest_step();
//                     report.steps_per_second = max(0, tracker.StepsPerSecond(now));
//                     report.row = tracker.RowText(now);
//   a scrape:         MetricsServer::Listen(loop, port, [&] { return tracker.Status(clock.Now());
//   })
//
// `now` is of a Clock that is CLOCK_MONOTONIC, as the pages' stamps are. Thread-compatible.
class NodeStatusTracker {
 public:
  // What does not change while the agent lives.
  struct Identity {
    std::string run_id;
    int64_t instance = 0;  // of the run id; 0: not known
    std::string host;
    std::string role;
    pid_t agent_pid = 0;
    int max_restarts = 0;
    int min_nodes = 1;
    int max_nodes = 1;
    double heartbeat_interval_s = -1;
  };

  struct Generation {
    uint64_t number = 0;
    std::string nonce;
    std::string reason;  // why the one before it ended
    int restarts = 0;    // charged to the job so far
    int group_rank = 0;
    int nodes = 1;
    int world_size = 1;
  };

  // A worker's page, as far as it matters here.
  struct Progress {
    int64_t step = -1;  // the last commit of this generation; -1: none yet
    int64_t commit_monotonic_ns =
        0;              // its stamp, by the worker; one that cannot be is not believed
    std::string phase;  // that it is in; empty: it does not say
    int64_t failed_saves = 0;
    int64_t failed_saves_in_a_row = 0;
    std::string save_error;  // of the newest failed save
  };

  explicit NodeStatusTracker(Identity identity);

  // What the agent does, for people: "joining", "running", "stopping", "draining", ...
  void SetState(std::string state) { state_ = std::move(state); }

  // Forgets the workers and stragglers of the last one.
  void BeginGeneration(Generation generation);
  void WorkerStarted(int local_rank, int rank, pid_t pid, absl::Time now);
  void WorkerEnded(int local_rank);
  void Observe(int local_rank, const Progress& progress, absl::Time now);

  // Own time per step over the job's median; -1: not known (any more).
  void SetStragglerFactor(int local_rank, double factor);

  void StoreOutOfReach();
  void StoreBack() { store_in_reach_ = true; }
  void WorkerHung() { ++hangs_; }

  // The highest step that a local rank has committed in this generation; -1: none.
  int64_t highest_step() const;

  // Of the fastest local rank; -1 while no rank has committed two steps. A rank that stands still
  // gets slower with every second.
  double StepsPerSecond(absl::Time now) const;

  NodeRow Row(absl::Time now) const;

  // The row as text. The same as last time while only steps, times and speeds have changed and
  // NodeRowPeriodSeconds() has not passed: a store that is told changes only has little to do.
  std::string RowText(absl::Time now);

  // The job as this node knows it, for metrics: `nodes` is this one.
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
    std::deque<Commit> commits;  // the last ones, thinned out; the newest is exact
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
  std::string row_shape_;  // what in the row is told at once when it changes
  absl::Time row_made_ = absl::InfinitePast();
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_NODE_STATUS_TRACKER_H_
