#ifndef DDP_ELASTIC_AGENT_JOB_STATUS_H_
#define DDP_ELASTIC_AGENT_JOB_STATUS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

// The state of a job at one moment, for people and programs that watch it. `ddprun status` and the
// metrics endpoint both read this type.
//
//   agent      NodeStatusTracker -> NodeRow -> FormatNodeRow -> NodeReport::row -> Redis
//   status     Redis -> job_reader -> ParseNodeRow -> JobStatus -> table or JSON
//   metrics    the agent's own JobStatus, of one node -> MetricsServer
//
// Plain values and pure functions; any thread. Unless a field says otherwise, unknown numbers are
// -1 and unknown texts are empty.
namespace ddp::elastic {

// A worker, as its agent sees it.
struct RankRow {
  int rank = -1;
  int local_rank = -1;
  pid_t pid = 0;                 // 0: the worker has ended
  int64_t step = -1;             // last committed step of this generation
  double steps_per_second = -1;  // over the last steps
  std::string phase;             // "forward"; empty if the program reports no phases
  double progress_age_s = -1;    // since its last commit, or since its start
  double straggler_factor = -1;  // own time per step over the job's median; 1: at the median
  bool operator==(const RankRow&) const = default;
};

// A node, as its agent describes it. Each agent sends a changed row with a heartbeat.
struct NodeRow {
  std::string host;     // label of the machine
  std::string role;     // of its workers
  int group_rank = -1;  // in `generation`; -1: none yet
  pid_t agent_pid = 0;
  uint64_t generation = 0;  // the last one that the node took part in; 0: none yet
  std::string state;        // state of the agent: "joining", "running", "stopping", ...
  // Checkpoint saves that failed on this node: since its agent was started, and since the last
  // successful save; the error of the newest failed save.
  int64_t failed_saves = 0;
  int64_t failed_saves_in_a_row = 0;
  std::string save_error;
  std::vector<RankRow> ranks;  // of `generation`, by local rank
  bool operator==(const NodeRow&) const = default;
};

// Returns the row as one line of JSON, at most kNodeRowBytesMax long. Rows are short (about 70
// bytes plus 70 for each rank), because every node sends one every few seconds. Ranks beyond
// kRanksOfNodeMax are left out; texts are cut at kTextBytesMax. Agents of several releases may
// share a job: fields that an older release lacks are optional, and readers ignore unknown fields.
std::string FormatNodeRow(const NodeRow& row);

// Parses the output of FormatNodeRow, which comes from the store and is not trusted. Errors:
// kInternal (too long, wrong shape or out of range; names the fault).
absl::StatusOr<NodeRow> ParseNodeRow(const std::string& text);

inline constexpr size_t kNodeRowBytesMax = 512 * 1024;
inline constexpr size_t kRanksOfNodeMax = 1024;
inline constexpr size_t kTextBytesMax = 256;

// A node, as the job knows it.
struct NodeStatus {
  std::string node;          // unique name of its agent process in the rendezvous
  bool is_member = false;    // of the current generation; false: waits to join
  bool has_lease = true;     // false: the node has left, or the store forgot it
  double lease_left_s = -1;  // by the store's clock; negative: the lease has run out
  bool row_known = false;    // false: the node has sent no row, and `row` is empty
  NodeRow row;
};

// A failure that ended a generation.
struct FailureStatus {
  double unix_time_s = 0;  // by the store's clock
  uint64_t generation = 0;
  int rank = -1;
  std::string host;
  std::string cause;     // one line: "rank 1 was killed by SIGKILL"
  bool charged = false;  // to the restart budget
};

struct JobStatus {
  std::string run_id;
  int64_t instance = 0;  // of the run id, from 1
  // "forming", "running", "draining", or the kind of end. In metrics: NodeRow::state of the agent.
  std::string state;
  std::string end_reason;  // one line, after the job has ended
  uint64_t generation = 0;
  std::string nonce;   // of the generation
  std::string reason;  // why the previous generation ended; forming or draining: why this one ends
  int restarts = 0;    // charged so far
  int max_restarts = 0;
  int min_nodes = 1;
  int max_nodes = 1;
  int world_size = 0;                   // ranks of the current generation
  double unix_time_s = 0;               // time of this snapshot, by the store's clock
  int64_t nodes_total = 0;              // nodes that the store knows; `nodes` may hold fewer
  std::vector<NodeStatus> nodes;        // members by group rank, then waiting nodes
  std::vector<FailureStatus> failures;  // newest first

  // State of the agent itself; not in `ddprun status`.
  bool store_in_reach = true;
  double heartbeat_interval_s = -1;
  uint64_t store_outages = 0;  // since the agent was started
  uint64_t hangs = 0;          // workers that the agent stopped because they hung
};

// CommonStep returns the step that all ranks of the generation have committed; -1 while a rank has
// committed none or is unknown. CommonStepsPerSecond returns the speed of the slowest rank whose
// speed is known; -1 if none is.
int64_t CommonStep(const JobStatus& status);
double CommonStepsPerSecond(const JobStatus& status);

// Returns how long an agent may wait before it sends its row again when only steps and times have
// changed. The period grows with the job, so the rows of 10,000 nodes cost the store little: 1 s up
// to 500 nodes, 20 s at 10,000.
double NodeRowPeriodSeconds(int nodes);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_JOB_STATUS_H_
