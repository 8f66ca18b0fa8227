#ifndef DDP_ELASTIC_AGENT_EVENT_LOG_H_
#define DDP_ELASTIC_AGENT_EVENT_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::elastic {

// Writes what happened to a job as JSON lines, for programs: benchmarks, dashboards, tests.
//
// Each line is one object with `event`, `monotonic_ns` (CLOCK_MONOTONIC), `unix_time` (seconds),
// `run_id`, `generation`, and by event:
//   generation_started  ranks, pids                       all workers of this node are running
//   worker_exited       rank, pid, exit_code | signal     every end, good or bad, asked for or not
//   restart             restart, max_restarts, reason     `generation` is the new one
//   first_step          rank, step                        `monotonic_ns` is the worker's own stamp
//                                                         at the end of its first optimizer step
//   job_finished        exit_code
//
// A line is one write() to a file opened for appending, so lines never mix and a reader never sees
// half of one that is complete. A write that fails is reported once on stderr and stops the log,
// not the job. Not thread-safe.
class EventLog {
 public:
  // Writes nothing.
  EventLog() = default;

  // Appends to `path`, made if missing; an empty path writes nothing. Errors: kInvalidArgument
  // (names the path and why it cannot be opened).
  static absl::StatusOr<EventLog> Open(const std::string& path, const std::string& run_id);

  struct Worker {
    int rank = 0;
    pid_t pid = 0;
  };
  struct Restart {
    int restart = 0;
    int max_restarts = 0;
    std::string reason;
  };
  struct FirstStep {
    int rank = 0;
    int64_t step = 0;
    int64_t monotonic_ns = 0;
  };

  void GenerationStarted(uint64_t generation, const std::vector<Worker>& workers);
  void WorkerExited(uint64_t generation, const Worker& worker, const ExitStatus& status);
  void Restarted(uint64_t generation, const Restart& restart);
  void FirstStepDone(uint64_t generation, const FirstStep& first_step);
  void JobFinished(uint64_t generation, int exit_code);

  bool enabled() const { return fd_.valid(); }

 private:
  EventLog(UniqueFd fd, std::string path, std::string run_id);

  struct Line;
  void Write(const char* event, uint64_t generation, Line line);

  UniqueFd fd_;
  std::string path_;
  std::string run_id_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_EVENT_LOG_H_
