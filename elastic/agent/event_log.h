#ifndef DDP_ELASTIC_AGENT_EVENT_LOG_H_
#define DDP_ELASTIC_AGENT_EVENT_LOG_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file_writer.h"
#include "base/unique_fd.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::elastic {

// Writes the events of a job, as one node sees them, as JSON lines for programs: benchmarks,
// dashboards, tests. docs/watching.md explains every event and every field. ddprun owns the log.
//
// Each line is one object with `event`, `monotonic_ns` (CLOCK_MONOTONIC), `unix_time` (seconds),
// `run_id`, `generation`, and the node's `host` and `role`. Unless the page says otherwise,
// `generation` is the last one that this node took part in. `group_rank` is there once the node has
// one. Each method below is one event, and writes that event's further fields.
//
// The file is opened for appending, and each line is one write(), so lines of several writers do
// not mix. A failed write is reported to the user once; it ends the file, not the job. With a
// FileWriter a stalled file does not block the job: up to kKeptBytes of lines are kept. Further
// lines are dropped, and their number is reported when the file takes lines again.
//
// Thread-compatible.
class EventLog {
 public:
  static constexpr size_t kKeptBytes = 1 << 20;

  struct Options {
    std::string path;      // appended to, created if missing; empty: no file
    bool console = false;  // lines also go to stderr
    // Prints a line on stderr, given without its line end; must not block. Empty: stderr, blocking.
    std::function<void(const std::string& line)> write_to_console;
    // Writes the file; not owned, must outlive the log. Null: the log writes the file, blocking.
    FileWriter* writer = nullptr;
    std::string run_id;
    std::string host;  // label of this node; empty: the field is left out
    std::string role;  // of its workers; empty: the field is left out
    // Prints a line of ddprun's own, as Agent::Dependencies::say does. Empty: stderr, blocking.
    std::function<void(const std::string& line)> say;
  };

  // A log that writes nothing.
  EventLog() = default;

  // Opens the log. Errors: kInvalidArgument (names the path and why it cannot be opened).
  static absl::StatusOr<EventLog> Open(const Options& options);
  static absl::StatusOr<EventLog> Open(const std::string& path, const std::string& run_id) {
    Options options;
    options.path = path;
    options.run_id = run_id;
    return Open(options);
  }

  // Sets the `run_id` of later lines.
  void SetRunId(const std::string& run_id) { options_.run_id = run_id; }

  struct Offer {
    int nodes_min = 1;
    int nodes_max = 1;
    int nproc = 1;
  };
  // This node's place in a generation.
  struct Place {
    std::string nonce;
    int group_rank = 0;
    int nodes = 1;
    int world_size = 1;
    int first_rank = 0;
    int nproc = 1;
    int restarts = 0;  // charged to the job so far
  };
  struct Worker {
    int rank = 0;
    pid_t pid = 0;
  };
  struct FirstStep {
    int rank = 0;
    int64_t step = 0;
    int64_t monotonic_ns = 0;
  };
  struct Hang {
    int rank = 0;
    std::string phase;
    absl::Duration stalled_for;
    absl::Duration longest_step;
    bool waits_for_peers = false;  // more likely the victim of a hang than its cause
  };
  struct Straggler {
    int rank = 0;
    std::string phase;  // phase in which the rank loses the time
    double factor = 1;
  };
  struct Drain {
    std::string reason;
    int64_t stop_at_step = -1;  // -1: at once
  };
  struct Restart {
    int restart = 0;
    int max_restarts = 0;
    std::string reason;
  };

  // Each function writes one event; the order is that of the list above. `generation` is the number
  // of the generation.
  void Joining(uint64_t generation, const Offer& offer);
  void Joined(uint64_t generation, const Place& place);
  void GenerationStarted(uint64_t generation, const std::vector<Worker>& workers);
  void FirstStepDone(uint64_t generation, const FirstStep& first_step);
  void WorkerExited(uint64_t generation, const Worker& worker, const ExitStatus& status);
  void WorkerHangs(uint64_t generation, const Hang& hang);
  void WorkerStraggles(uint64_t generation, const Straggler& straggler);
  void GenerationOver(uint64_t generation, const std::string& reason);
  void Drains(uint64_t generation, const Drain& drain);
  void Evicted(uint64_t generation, const std::string& reason);
  void Restarted(uint64_t generation, const Restart& restart);
  void StoreOutOfReach(uint64_t generation, const std::string& reason);
  void StoreBack(uint64_t generation, absl::Duration outage);
  void SignalReceived(uint64_t generation, int signal);
  void JobFinished(uint64_t generation, int exit_code, const std::string& reason = "");

  bool enabled() const { return file_.valid() || sink_ != nullptr || console_; }

 private:
  struct Line;
  struct Sink;  // the file at the writer, which may call back after the log is gone
  void Write(const char* event, uint64_t generation, Line line);
  void WriteToFile(const std::string& text);
  void AddToWriter();

  UniqueFd file_;
  std::shared_ptr<Sink> sink_;  // used instead of file_ with a FileWriter
  bool console_ = false;
  Options options_;
  int group_rank_ = -1;  // -1: none yet
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_EVENT_LOG_H_
