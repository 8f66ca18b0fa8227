#ifndef DDP_ELASTIC_RENDEZVOUS_ROUND_H_
#define DDP_ELASTIC_RENDEZVOUS_ROUND_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ddp::elastic {

// Which generation a message belongs to. Both parts are compared: after a fail-over that lost
// writes two generations may carry the same number, never the same nonce.
struct GenerationId {
  uint64_t number = 0;  // counts from 1; 0: none yet
  std::string nonce;    // 16 hexadecimal digits
  bool operator==(const GenerationId&) const = default;
};

// What a node brings into a round.
struct NodeOffer {
  int nproc = 1;            // workers that it runs
  std::string role;         // of its workers
  std::string host;         // the machine, for people and for the quarantine of machines
  std::string master_addr;  // where the others reach this node
  int master_port = 0;      // where its workers' store listens, should it hold rank 0
  int node_rank = -1;       // the group rank that it wants (--node-rank); -1: any
  bool operator==(const NodeOffer&) const = default;
};

// Where a node's workers stand among all. Ranks are contiguous per node, in the order of the nodes;
// nodes may run different numbers of workers. Role ranks count the workers of one role only.
struct NodePlacement {
  int group_rank = 0;
  int group_world_size = 0;
  int local_world_size = 0;
  int first_rank = 0;
  int world_size = 0;
  int first_role_rank = 0;
  int role_world_size = 0;
  std::string master_addr;  // of the node that holds rank 0
  int master_port = 0;
  bool operator==(const NodePlacement&) const = default;
};

// A complete round, in the eyes of one of its nodes. `generation`, `run_id`, `restarts`,
// `store_url`, `reason` and `charged` are the same for all.
struct Round {
  GenerationId generation;
  int restarts = 0;  // failures charged to the whole job so far
  NodePlacement placement;
  // What the workers are told as TORCHELASTIC_RUN_ID: the user's, or, where agents meet without an
  // id, one of this job alone.
  std::string run_id = {};
  std::string store_url;  // of the workers' store in this generation; no secrets
  // Why the generation before ended, one line: "rank 1 was killed by SIGKILL", "node a-12 was
  // lost", "node b-7 joins". Empty for the first.
  std::string reason;
  bool charged = false;  // whether that was charged to the budget
  bool masters = false;  // rank 0 is on this node
};

// What the node that opened a job has given it, and what counts for all of its nodes.
struct JobLimits {
  int max_restarts = 0;
  int min_nodes = 1;
  int max_nodes = 1;
  bool operator==(const JobLimits&) const = default;
};

// How a job ended, for all of its nodes.
struct JobEnd {
  enum class Kind {
    kSucceeded,    // all workers of all nodes have
    kBudgetSpent,  // a failure, and no restart left to spend
    kNoProgress,   // failed again and again without a step between
    kClosed,       // a node ended it: its program cannot be started
  };
  Kind kind = Kind::kClosed;
  std::string reason;     // the root cause, one line; empty on success
  int exit_code = 0;      // of the process that is the root cause, as a shell has it; 0: unknown
  std::string host = {};  // where that was; empty: unknown
  bool operator==(const JobEnd&) const = default;
};

// "succeeded", "budget_spent", "no_progress", "closed".
const char* JobEndName(JobEnd::Kind kind);

// kInternal, naming what is wrong, unless a placement could be one: ranks and sizes that agree with
// each other. For what came over a wire.
absl::Status ValidatePlacement(const NodePlacement& placement);

// kInvalidArgument, naming what is wrong, unless a node may offer this.
absl::Status ValidateOffer(const NodeOffer& offer);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_ROUND_H_
