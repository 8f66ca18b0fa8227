#ifndef DDP_ELASTIC_RENDEZVOUS_JOB_READER_H_
#define DDP_ELASTIC_RENDEZVOUS_JOB_READER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "store/redis/redis_connection.h"

namespace ddp::elastic {

// A snapshot of a job, read from the store by an observer that takes no part in it. All times are
// by the store's clock.

// A member of the current generation, or a node that waits to join the next.
struct NodeRecord {
  std::string node;
  bool is_member = false;
  int group_rank = -1;  // -1: not a member
  std::string host;
  std::string role;
  int nproc = 0;
  bool has_lease = true;
  double lease_left_s = 0;  // negative: the lease has run out
  std::string row;          // NodeReport::row as the node sent it, not validated; may be empty
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
  // Older running instances of the same run id, if ReadJob() chose the instance.
  std::vector<int64_t> other_running;
  // "forming", "running", "draining" (membership is about to change), or the kind of end:
  // "succeeded", "budget_spent", "no_progress", "closed", "abandoned".
  std::string state;
  std::string end_reason;
  uint64_t generation = 0;
  std::string nonce;
  std::string reason;  // why the previous generation ended; forming or draining: why this one ends
  int restarts = 0;
  int max_restarts = 0;
  int min_nodes = 0;
  int max_nodes = 0;
  int world_size = 0;
  double unix_time_s = 0;
  int64_t nodes_total = 0;
  std::vector<NodeRecord> nodes;        // at most `nodes_max` of them, members first
  std::vector<FailureRecord> failures;  // newest first
};

// Reads one instance of a run. `instance` 0: the newest running one of the last 32, or else the
// newest that exists. Changes nothing in the store. One transaction reads the members and leases;
// further commands read the rows, 256 nodes at a time.
//
// Blocks within the connection's own deadlines. Errors: those of RedisConnection; kNotFound (no
// such run or instance; the message is for people); kInternal (the stored data makes no sense).
absl::StatusOr<JobRecord> ReadJob(store::RedisConnection& connection, const std::string& run_id,
                                  int64_t instance, size_t nodes_max);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_JOB_READER_H_
