#ifndef DDP_ELASTIC_RENDEZVOUS_ROUND_H_
#define DDP_ELASTIC_RENDEZVOUS_ROUND_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ddp::elastic {

// Most nodes of a job, and most workers of a node.
inline constexpr int kNodesMax = 1 << 16;
inline constexpr int kNprocMax = 1 << 16;

// Identifies a generation in the messages of the rendezvous. Two ids are equal if both parts are:
// after a fail-over of Redis that lost writes, two generations may have the same number, but never
// the same nonce.
struct GenerationId {
  uint64_t number = 0;  // counts from 1; 0: none yet
  std::string nonce;    // 16 hexadecimal digits
  bool operator==(const GenerationId&) const = default;
};

// A node's offer to take part in a round.
struct NodeOffer {
  int nproc = 1;            // workers that it runs
  std::string role;         // of its workers: ROLE_NAME
  std::string host;         // the machine's name, for people and for the quarantine of machines
  std::string master_addr;  // address at which other nodes reach this one
  int master_port = 0;      // port of its workers' store, used if it holds rank 0
  int node_rank = -1;       // wanted group rank (--node-rank); -1: any
  bool operator==(const NodeOffer&) const = default;
};

// The place of one node's workers in a round. The ranks of a node's workers are first_rank to
// first_rank + local_world_size - 1. Nodes may run different numbers of workers. Role ranks count
// the workers of one role only.
struct NodePlacement {
  int group_rank = 0;        // number of the node in the round: torchrun's GROUP_RANK
  int group_world_size = 0;  // number of nodes
  int local_world_size = 0;
  int first_rank = 0;
  int world_size = 0;
  int first_role_rank = 0;
  int role_world_size = 0;
  std::string master_addr;  // of the node that holds rank 0
  int master_port = 0;
  bool operator==(const NodePlacement&) const = default;
};

// A complete round, as one of its nodes sees it. `generation`, `run_id`, `restarts`, `store_url`,
// `reason` and `charged` are the same for all nodes.
struct Round {
  GenerationId generation;
  int restarts = 0;  // failures charged to the whole job so far
  NodePlacement placement;
  // The workers' TORCHELASTIC_RUN_ID: the user's run id. Agents without a run id get an id that
  // belongs to this job alone.
  std::string run_id = {};
  std::string store_url;  // URL of the workers' store in this generation; without secrets
  // Why the previous generation ended, one line: "rank 1 was killed by SIGKILL", "node a-12 was
  // lost", "node b-7 joins". Empty for the first generation.
  std::string reason;
  bool charged = false;  // whether that end was charged to the budget
};

// The end of a job, the same for all of its nodes.
struct JobEnd {
  enum class Kind {
    kSucceeded,    // all workers of all nodes have succeeded
    kBudgetSpent,  // a worker failed, and no restart is left
    kNoProgress,   // failures in a row without a committed step between them
    kNodesLost,    // nodes were lost too often
    kClosed,       // a node ended the job: its program cannot be started
  };
  Kind kind = Kind::kClosed;
  std::string reason;     // the root cause, one line; empty on success
  int exit_code = 0;      // of the root cause's process, as a shell reports it; 0: unknown
  std::string host = {};  // machine of the root cause; empty: unknown
  bool operator==(const JobEnd&) const = default;
};

// Returns "succeeded", "budget_spent", "no_progress", "nodes_lost" or "closed".
const char* JobEndName(JobEnd::Kind kind);

// Checks a placement that came over the wire: its ranks, sizes and port must be in range and agree
// with each other. Errors: kInternal, which names the value.
absl::Status ValidatePlacement(const NodePlacement& placement);

// Checks the worker count and the port of an offer. Errors: kInvalidArgument, which names the
// value.
absl::Status ValidateOffer(const NodeOffer& offer);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_ROUND_H_
