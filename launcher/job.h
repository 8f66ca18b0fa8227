#ifndef DDP_LAUNCHER_JOB_H_
#define DDP_LAUNCHER_JOB_H_

#include <optional>
#include <string>
#include <vector>

#include "elastic/job/job_spec.h"
#include "launcher/flags/launch_options.h"
#include "launcher/output/log_lines.h"
#include "launcher/process/keeper.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {

// Input of RunJob(): everything that the agent's process needs.
struct JobInput {
  // `output.log_dir` is never empty: the user's or `temporary_log_folder`. `job` has a run id, and
  // a fingerprint if the user gave no run id.
  LaunchOptions options;

  // As in LaunchConfig, which RunJob() makes of these, of the options, and of the addresses and
  // limits that it finds.
  std::vector<std::string> command;
  std::string entrypoint;
  std::string timer_file;

  std::optional<store::RedisEndpoint> endpoint;  // endpoint that the user named, with credentials
  std::string runtime_folder;                    // our folder, mode 0700; removed at the end
  std::string temporary_log_folder;              // our folder; empty when the user named one
  LogLines* log_lines = nullptr;  // sink of our libraries' log; not owned, may be null
};

// Returns a short text that is equal for all agents of a job: a hash of the node limits, the role,
// the program and its arguments. The number of workers and the path of an interpreter are left out,
// since they may differ from node to node. `program` is what the user typed, with its arguments.
// Pure.
std::string JobFingerprint(const elastic::JobSpec& job, const std::vector<std::string>& program);

// Returns the text by which nodes with one run id see that they run the same program with the same
// arguments: a hash, a space, and the beginning of the command line. Pure.
std::string ProgramText(const std::vector<std::string>& program);

// Runs the job in this process, the agent's: makes the parts, runs an Agent with them, reports the
// result. Reports on stderr, in one line each, what could not be started, and prints the failure
// report of a failed job. Removes `runtime_folder`. Returns ddprun's exit code.
//
// Blocks until the job has ended on this node and its output is written or given up. A node with
// the job's Redis server also waits for the other nodes. Thread: main, inside RunWithKeeper().
int RunJob(const JobInput& input, const AgentContext& context);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_JOB_H_
