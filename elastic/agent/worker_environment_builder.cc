#include "elastic/agent/worker_environment_builder.h"

#include <string.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/health/health_page.h"

namespace ddp::elastic {
namespace {

constexpr char kAsyncErrorHandling[] = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
constexpr char kOmpNumThreads[] = "OMP_NUM_THREADS";
constexpr char kVisibleDevices[] = "CUDA_VISIBLE_DEVICES";
constexpr char kGlooInterface[] = "GLOO_SOCKET_IFNAME";

using Environment = std::map<std::string, std::string>;

std::string SignalNames(const std::vector<int>& signals) {
  std::vector<std::string> names;
  names.reserve(signals.size());
  for (const int signal : signals) names.push_back(SignalName(signal));
  return absl::StrJoin(names, ",");
}

// Returns the one device that a worker sees with virtual local ranks: the device at its local rank
// among those visible to the agent.
std::string DeviceOf(int local_rank, const Environment& inherited) {
  const auto visible = inherited.find(kVisibleDevices);
  if (visible == inherited.end()) return absl::StrCat(local_rank);
  const std::vector<std::string> devices = absl::StrSplit(visible->second, ',');
  const auto index = static_cast<size_t>(local_rank);
  // The launcher refuses more workers than devices. Such a worker gets no device.
  if (index >= devices.size()) return "";
  return std::string(absl::StripAsciiWhitespace(devices[index]));
}

void PassThrough(const std::string& name, const std::string& value, const Environment& inherited,
                 Environment& environment) {
  const auto found = inherited.find(name);
  environment[name] = found == inherited.end() ? value : found->second;
}

}  // namespace

bool SetsOmpNumThreads(const LaunchConfig& config,
                       const std::map<std::string, std::string>& inherited) {
  return config.nproc_per_node > 1 && !inherited.contains(kOmpNumThreads);
}

std::string SubstituteLocalRank(const std::string& argument, int local_rank) {
  return absl::StrReplaceAll(argument, {{"${local_rank}", absl::StrCat(local_rank)}});
}

std::map<std::string, std::string> InheritedEnvironment() {
  std::map<std::string, std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = strchr(*entry, '=');
    if (equals != nullptr) environment[std::string(*entry, equals - *entry)] = equals + 1;
  }
  return environment;
}

std::map<std::string, std::string> BuildWorkerEnvironment(
    const LaunchConfig& config, const Round& round, int local_rank, int health_fd,
    const std::map<std::string, std::string>& inherited) {
  const NodePlacement& placement = round.placement;
  std::map<std::string, std::string> environment = {
      {"LOCAL_RANK", absl::StrCat(local_rank)},
      {"RANK", absl::StrCat(placement.first_rank + local_rank)},
      {"GROUP_RANK", absl::StrCat(placement.group_rank)},
      {"ROLE_RANK", absl::StrCat(placement.first_role_rank + local_rank)},
      {"ROLE_NAME", config.job.role},
      {"LOCAL_WORLD_SIZE", absl::StrCat(placement.local_world_size)},
      {"WORLD_SIZE", absl::StrCat(placement.world_size)},
      {"GROUP_WORLD_SIZE", absl::StrCat(placement.group_world_size)},
      {"ROLE_WORLD_SIZE", absl::StrCat(placement.role_world_size)},
      {"MASTER_ADDR", placement.master_addr},
      {"MASTER_PORT", absl::StrCat(placement.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(round.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", absl::StrCat(config.job.limits.max_restarts)},
      {"TORCHELASTIC_RUN_ID", round.run_id.empty() ? config.job.run_id : round.run_id},
      // Python compares this text. The agent of rank 0's node serves the TCPStore.
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", SignalNames(config.signals_to_handle)},
      {"DDP_STORE", round.store_url},
      {"DDP_GENERATION", absl::StrCat(round.generation.number)},
      {"DDP_GENERATION_NONCE", round.generation.nonce},
      {kHealthFdVariable, absl::StrCat(health_fd)},
  };
  // LibTorch's own default differs from torchrun's, which programs have always run with.
  PassThrough(kAsyncErrorHandling, "1", inherited, environment);
  if (SetsOmpNumThreads(config, inherited)) environment[kOmpNumThreads] = "1";
  if (!config.socket_interface.empty()) {
    PassThrough(kGlooInterface, config.socket_interface, inherited, environment);
  }
  if (!config.timer_file.empty()) environment["TORCHELASTIC_TIMER_FILE"] = config.timer_file;
  if (config.virtual_local_rank) {
    environment["LOCAL_RANK"] = "0";
    environment[kVisibleDevices] = DeviceOf(local_rank, inherited);
  }
  return environment;
}

}  // namespace ddp::elastic
