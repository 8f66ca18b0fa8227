#ifndef DDP_ELASTIC_RENDEZVOUS_JOB_READER_H_
#define DDP_ELASTIC_RENDEZVOUS_JOB_READER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "store/redis_connection.h"

namespace ddp::elastic {

// What the store holds of a job, for those who look at it from outside. Times are the store's.

// A member of the current generation, or a node that waits to join the next.
struct NodeRecord {
  std::string node;
  bool is_member = false;
  int group_rank = -1;  // of a member
  std::string host;
  std::string role;
  int nproc = 0;
  bool has_lease = true;
  double lease_left_s = 0;  // negative: it has run out
  std::string row;          // as the node sent it (NodeReport::row); not looked into; may be empty
};

struct FailureRecord {
  double unix_time_s = 0;
  uint64_t generation = 0;
  int rank = -1;
  std::string host;
  std::string cause;
  bool charged = false;
};

struct JobRecord {
  int64_t instance = 0;
  std::vector<int64_t> other_running;  // instances of the same run id that run too
  // "forming", "running", "draining" (membership is about to change), or how it has ended:
  // "succeeded", "budget_spent", "no_progress", "closed", "abandoned".
  std::string state;
  std::string end_reason;
  uint64_t generation = 0;
  std::string nonce;
  std::string reason;  // why the generation before ended; while forming or draining, why this one
  int restarts = 0;
  int max_restarts = 0;
  int min_nodes = 0;
  int max_nodes = 0;
  int world_size = 0;
  double unix_time_s = 0;
  int64_t nodes_total = 0;
  std::vector<NodeRecord> nodes;        // at most `nodes_max` of them, members first
  std::vector<FailureRecord> failures;  // the newest first
};

// Reads an instance of a run: `instance` 0 means the newest one that runs, or else the newest. It
// changes nothing in the store, and holds it up for no longer than a few hundred nodes take.
//
// Blocks, within the connection's own deadlines. Errors: those of RedisConnection; kNotFound (there
// is no such run or instance: says so for people); kInternal (what is there makes no sense).
absl::StatusOr<JobRecord> ReadJob(store::RedisConnection& connection, const std::string& run_id,
                                  int64_t instance, size_t nodes_max);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_JOB_READER_H_
