#ifndef DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
#define DDP_ELASTIC_AGENT_WORKER_FAILURE_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::elastic {

// One worker that ended badly by itself; a worker that the agent stopped because of another one is
// none.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string role;
  pid_t pid = 0;
  ExitStatus status;
  absl::Time wall_time;    // when the agent saw it, for people
  std::string error_file;  // where the worker was told to describe its failure; may not exist
};

// How a job ended on this node.
struct JobResult {
  int exit_code = 0;  // of ddprun: 0 or 1
  // Of the last generation, in the order in which they were seen: the first is the root cause.
  // Empty when the job succeeded, was stopped by a signal or could not be started.
  std::vector<WorkerFailure> failures;
  // One line for people, without a full stop: why the job ended. Empty on success.
  std::string reason;
};

// "exited with code 3", "was killed by SIGKILL".
std::string DescribeExit(const ExitStatus& status);

// "SIGKILL"; "signal 99" for a number without a name.
std::string SignalName(int signal);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
