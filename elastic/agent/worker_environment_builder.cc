#include "elastic/agent/worker_environment_builder.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "elastic/health/health_page.h"

namespace ddp::elastic {
namespace {

constexpr char kAsyncErrorHandling[] = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
constexpr char kOmpNumThreads[] = "OMP_NUM_THREADS";

}  // namespace

bool SetsOmpNumThreads(const LaunchConfig& config,
                       const std::map<std::string, std::string>& inherited) {
  return config.nproc_per_node > 1 && !inherited.contains(kOmpNumThreads);
}

std::string SubstituteLocalRank(const std::string& argument, int local_rank) {
  return absl::StrReplaceAll(argument, {{"${local_rank}", absl::StrCat(local_rank)}});
}

std::map<std::string, std::string> BuildWorkerEnvironment(
    const LaunchConfig& config, const Round& round, int local_rank, int health_fd,
    const std::map<std::string, std::string>& inherited) {
  const NodePlacement placement = PlaceNode(round);
  std::map<std::string, std::string> environment = {
      {"LOCAL_RANK", absl::StrCat(local_rank)},
      {"RANK", absl::StrCat(placement.first_rank + local_rank)},
      {"GROUP_RANK", absl::StrCat(placement.group_rank)},
      {"ROLE_RANK", absl::StrCat(placement.first_role_rank + local_rank)},
      {"ROLE_NAME", config.role},
      {"LOCAL_WORLD_SIZE", absl::StrCat(placement.local_world_size)},
      {"WORLD_SIZE", absl::StrCat(placement.world_size)},
      {"GROUP_WORLD_SIZE", absl::StrCat(placement.group_world_size)},
      {"ROLE_WORLD_SIZE", absl::StrCat(placement.role_world_size)},
      {"MASTER_ADDR", placement.master_addr},
      {"MASTER_PORT", absl::StrCat(placement.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(round.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", absl::StrCat(config.max_restarts)},
      {"TORCHELASTIC_RUN_ID", config.run_id},
      // Python compares the text: rank 0 serves the TCPStore itself.
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", kHandledSignals},
      {"DDP_STORE", round.store_url},
      {"DDP_GENERATION", absl::StrCat(round.generation.number)},
      {"DDP_GENERATION_NONCE", round.generation.nonce},
      {kHealthFdVariable, absl::StrCat(health_fd)},
  };
  // LibTorch's own default differs from the one that every program under torchrun has been run
  // with.
  const auto async_error_handling = inherited.find(kAsyncErrorHandling);
  environment[kAsyncErrorHandling] =
      async_error_handling == inherited.end() ? "1" : async_error_handling->second;
  if (SetsOmpNumThreads(config, inherited)) environment[kOmpNumThreads] = "1";
  return environment;
}

}  // namespace ddp::elastic
