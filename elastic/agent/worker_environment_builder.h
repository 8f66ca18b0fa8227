#ifndef DDP_ELASTIC_AGENT_WORKER_ENVIRONMENT_BUILDER_H_
#define DDP_ELASTIC_AGENT_WORKER_ENVIRONMENT_BUILDER_H_

#include <map>
#include <string>

#include "elastic/agent/launch_config.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// Returns this process's environment.
std::map<std::string, std::string> InheritedEnvironment();

// Returns the environment variables of one worker of a round, which override inherited ones:
// torchrun's variables, and our DDP_STORE, DDP_GENERATION, DDP_GENERATION_NONCE and DDP_HEALTH_FD.
// The spawner adds TORCHELASTIC_ERROR_FILE, because it knows the log folders.
//
// `inherited` is the agent's own environment. The user's values of TORCH_NCCL_ASYNC_ERROR_HANDLING,
// OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are kept. With virtual local ranks, CUDA_VISIBLE_DEVICES
// lists the devices that the workers share. Pure.
std::map<std::string, std::string> BuildWorkerEnvironment(
    const LaunchConfig& config, const Round& round, int local_rank, int health_fd,
    const std::map<std::string, std::string>& inherited);

// Returns true when BuildWorkerEnvironment sets OMP_NUM_THREADS; the user should be informed.
bool SetsOmpNumThreads(const LaunchConfig& config,
                       const std::map<std::string, std::string>& inherited);

// Returns `argument` with each ${local_rank} replaced.
std::string SubstituteLocalRank(const std::string& argument, int local_rank);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_ENVIRONMENT_BUILDER_H_
