#ifndef DDP_COMMON_WORKER_ENVIRONMENT_H_
#define DDP_COMMON_WORKER_ENVIRONMENT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/environment.h"

namespace ddp::internal {

// The environment variables that a launcher sets for a worker: torchrun's names, and DDP_ names for
// what torchrun does not have. A value; thread-compatible.
struct WorkerEnvironment {
  // The rank's place in the job. 0 <= rank < world_size holds.
  int rank = 0;                 // RANK
  int world_size = 1;           // WORLD_SIZE
  int local_rank = 0;           // LOCAL_RANK; RANK where that is unset
  int local_world_size = 0;     // LOCAL_WORLD_SIZE, above local_rank; 0 where that is unset
  bool has_local_rank = false;  // LOCAL_RANK is set

  // The store through which the ranks connect: a Redis store at DDP_STORE when ddprun has set that
  // variable, otherwise a TCPStore at master_addr:master_port.
  std::string store_url;     // DDP_STORE, a URL without secrets; may be empty
  std::string master_addr;   // MASTER_ADDR; may be empty when store_url is not
  int master_port = 0;       // MASTER_PORT, 1..65535; 0 when unset
  bool agent_store = false;  // TORCHELASTIC_USE_AGENT_STORE=True: the launcher serves the TCPStore

  // The generation: one start of all workers of the job. Its number and its nonce together name it.
  uint64_t generation = 0;       // DDP_GENERATION
  std::string generation_nonce;  // DDP_GENERATION_NONCE
  int64_t restart_count = 0;     // TORCHELASTIC_RESTART_COUNT
  int64_t max_restarts = 0;      // TORCHELASTIC_MAX_RESTARTS
  std::string run_id;            // TORCHELASTIC_RUN_ID

  // File descriptor of the health page, which the worker writes and the agent reads; -1 when unset.
  // See elastic/health.
  int health_fd = -1;  // DDP_HEALTH_FD

  // Reads and checks the variables of this process. The error is kInvalidArgument. It names every
  // variable that is missing, not a number, out of range or contradictory, and tells how to start
  // the program so that they are set.
  static absl::StatusOr<WorkerEnvironment> FromEnvironment();

  // Does the same for any source of variables.
  static absl::StatusOr<WorkerEnvironment> Parse(const VariableGetter& get);
};

}  // namespace ddp::internal

#endif  // DDP_COMMON_WORKER_ENVIRONMENT_H_
