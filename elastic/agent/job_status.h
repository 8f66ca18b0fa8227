#ifndef DDP_ELASTIC_AGENT_JOB_STATUS_H_
#define DDP_ELASTIC_AGENT_JOB_STATUS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

// What is known of a job at one moment, for people and programs that watch it: `ddprun status`, the
// metrics endpoint, and whatever else may come to look at a job, all read this one type.
//
//   agent      NodeStatusTracker -> NodeRow -> FormatNodeRow -> NodeReport::row -> Redis
//   status     Redis -> job_reader -> ParseNodeRow -> JobStatus -> table or JSON
//   metrics    the agent's own JobStatus, of one node -> MetricsServer
//
// Plain values and pure functions; any thread. Unknown numbers are -1, unknown texts empty.
namespace ddp::elastic {

// One worker as its agent sees it.
struct RankRow {
  int rank = -1;
  int local_rank = -1;
  pid_t pid = 0;                 // 0: it has ended
  int64_t step = -1;             // the last one that it committed in this generation
  double steps_per_second = -1;  // over the last steps
  std::string phase;             // "forward"; empty where the program does not say
  double progress_age_s = -1;    // since its last commit, or since it was started
  double straggler_factor = -1;  // its own time per step over the job's median; 1: as the others
  bool operator==(const RankRow&) const = default;
};

// One node as its agent describes it. Each agent sends its own with its heartbeats.
struct NodeRow {
  std::string host;     // label of the machine
  std::string role;     // of its workers
  int group_rank = -1;  // in `generation`; -1: in none yet
  pid_t agent_pid = 0;
  uint64_t generation = 0;  // the last one that it took part in; 0: none yet
  std::string state;        // what its agent does: "joining", "running", "stopping", ...
  // Saves of checkpoints that have failed on this node since its agent was started, and since the
  // last one that succeeded; why the newest of them failed.
  int64_t failed_saves = 0;
  int64_t failed_saves_in_a_row = 0;
  std::string save_error;
  std::vector<RankRow> ranks;  // of `generation`, by local rank
  bool operator==(const NodeRow&) const = default;
};

// The row as one line of JSON, at most kNodeRowBytesMax long: short, because every node sends its
// own every few seconds (about 70 bytes and as many for each rank). Of ranks beyond
// kRanksOfNodeMax the row says nothing; texts are cut at kTextBytesMax. Agents of several releases
// may share a job: a field that an older release lacks is optional, and a reader ignores fields
// that it does not know.
std::string FormatNodeRow(const NodeRow& row);

// Reads what FormatNodeRow wrote. Rows come from the store and are not trusted: kInternal, saying
// what is wrong, for anything that is too long, of another shape, or out of range.
absl::StatusOr<NodeRow> ParseNodeRow(const std::string& text);

inline constexpr size_t kNodeRowBytesMax = 512 * 1024;
inline constexpr size_t kRanksOfNodeMax = 1024;
inline constexpr size_t kTextBytesMax = 256;

// A node as the job knows it.
struct NodeStatus {
  std::string node;          // its agent process in the rendezvous: unique
  bool is_member = false;    // of the current generation; else it waits to join
  bool has_lease = true;     // else it has left, or the store has forgotten it
  double lease_left_s = -1;  // by the store's clock; negative: it has run out
  bool row_known = false;    // false: `row` holds nothing, the node has not described itself
  NodeRow row;
};

// A failure that ended a generation.
struct FailureStatus {
  double unix_time_s = 0;  // by the store's clock
  uint64_t generation = 0;
  int rank = -1;
  std::string host;
  std::string cause;     // one line: "rank 1 was killed by SIGKILL"
  bool charged = false;  // to the budget of restarts
};

struct JobStatus {
  std::string run_id;
  int64_t instance = 0;    // of the run id, from 1
  std::string state;       // "forming", "running", "draining", or how it has ended
  std::string end_reason;  // one line, once the job has ended
  uint64_t generation = 0;
  std::string nonce;   // of the generation
  std::string reason;  // why the generation before ended; while forming or draining, why this one
  int restarts = 0;    // charged so far
  int max_restarts = 0;
  int min_nodes = 1;
  int max_nodes = 1;
  int world_size = 0;                   // ranks of the current generation
  double unix_time_s = 0;               // when all this was so, by the store's clock
  int64_t nodes_total = 0;              // known to the store; `nodes` may hold fewer
  std::vector<NodeStatus> nodes;        // members by group rank, then those that wait
  std::vector<FailureStatus> failures;  // the newest first

  // What an agent knows of itself; not in `ddprun status`.
  bool store_in_reach = true;
  double heartbeat_interval_s = -1;
  uint64_t store_outages = 0;  // since the agent was started
  uint64_t hangs = 0;          // workers that it stopped because they hung
};

// The step that all ranks of the generation have committed: the smallest; -1 while a rank has none
// or is not known. And the speed of the slowest rank that has one; -1 without any.
int64_t CommonStep(const JobStatus& status);
double CommonStepsPerSecond(const JobStatus& status);

// How long an agent may go without sending its row anew when only steps and times in it have
// changed. Grows with the job, so that the rows of 10,000 nodes cost the store little: 1 s up to
// 500 nodes, 20 s at 10,000.
double NodeRowPeriodSeconds(int nodes);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_JOB_STATUS_H_
