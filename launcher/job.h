#ifndef DDP_LAUNCHER_JOB_H_
#define DDP_LAUNCHER_JOB_H_

#include <optional>
#include <string>

#include "elastic/agent/launch_config.h"
#include "launcher/keeper.h"
#include "launcher/launch_options.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {

// All that the agent's process needs to know.
struct JobSpec {
  elastic::LaunchConfig config;
  std::optional<store::RedisEndpoint> endpoint;  // none: a private server in `runtime_folder`
  StreamMap redirects;
  StreamMap tee;
  std::string log_dir;               // what the user named, or `temporary_log_folder`
  std::string runtime_folder;        // ours, 0700; gone at the end
  std::string temporary_log_folder;  // ours, or empty where the user named a folder
};

// Runs the job in this process, the agent's: makes the parts, hands them to an Agent, reports how
// it ended. Says on stderr, in one line each, what could not be started, and the failure report at
// the end of a job that failed. Returns ddprun's exit code.
//
// Call it on the main thread, under RunWithKeeper.
int RunJob(const JobSpec& spec, const AgentContext& context);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_JOB_H_
