#ifndef DDP_LAUNCHER_JOB_H_
#define DDP_LAUNCHER_JOB_H_

#include <optional>
#include <string>
#include <vector>

#include "elastic/agent/launch_config.h"
#include "launcher/keeper.h"
#include "launcher/launch_options.h"
#include "launcher/log_lines.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {

// All that the agent's process needs to know.
struct JobSpec {
  LaunchOptions options;  // its log_dir is never empty: the user's, or `temporary_log_folder`

  // Of `options`, with the program as the workers get it. The addresses are found later.
  elastic::LaunchConfig config;

  // The job by which agents without a run id of their own know each other; empty: by the run id.
  std::string fingerprint;

  std::optional<store::RedisEndpoint> endpoint;  // that the user named, with its credentials
  std::string runtime_folder;                    // ours, 0700; gone at the end
  std::string temporary_log_folder;              // ours, or empty where the user named a folder
  LogLines* log_lines = nullptr;                 // of our libraries; not owned, may be null
};

// What agents of one job have in common, as one short text: nodes, role, program and arguments. Not
// the number of workers or the place of an interpreter, which may differ from node to node.
// `program`: as the user typed it, with its arguments. Pure.
std::string JobFingerprint(const elastic::LaunchConfig& config,
                           const std::vector<std::string>& program);

// Runs the job in this process, the agent's: makes the parts, hands them to an Agent, reports how
// it ended. Says on stderr, in one line each, what could not be started, and the failure report at
// the end of a job that failed. Returns ddprun's exit code.
//
// Call it on the main thread, under RunWithKeeper.
int RunJob(const JobSpec& spec, const AgentContext& context);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_JOB_H_
