#ifndef DDP_ELASTIC_AGENT_WORKER_ENVIRONMENT_BUILDER_H_
#define DDP_ELASTIC_AGENT_WORKER_ENVIRONMENT_BUILDER_H_

#include <map>
#include <string>

#include "elastic/agent/launch_config.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// What one worker of a round is told in its environment, over what it inherits: the variables of
// torchrun, and our DDP_STORE, DDP_GENERATION, DDP_GENERATION_NONCE and DDP_HEALTH_FD.
// (TORCHELASTIC_ERROR_FILE is the spawner's, which knows where the logs lie.)
//
// `inherited` is the agent's own environment: TORCH_NCCL_ASYNC_ERROR_HANDLING, OMP_NUM_THREADS and
// GLOO_SOCKET_IFNAME keep the user's value where there is one, and with virtual local ranks
// CUDA_VISIBLE_DEVICES says which devices the workers share. Pure.
std::map<std::string, std::string> BuildWorkerEnvironment(
    const LaunchConfig& config, const Round& round, int local_rank, int health_fd,
    const std::map<std::string, std::string>& inherited);

// True when BuildWorkerEnvironment sets OMP_NUM_THREADS, which the user should hear of.
bool SetsOmpNumThreads(const LaunchConfig& config,
                       const std::map<std::string, std::string>& inherited);

// `argument` with each ${local_rank} replaced.
std::string SubstituteLocalRank(const std::string& argument, int local_rank);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_ENVIRONMENT_BUILDER_H_
