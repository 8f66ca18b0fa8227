#ifndef DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
#define DDP_ELASTIC_AGENT_WORKER_FAILURE_H_

#include <sys/types.h>

#include <string>

#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::elastic {

// A worker that failed.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  ExitStatus status;
  absl::Time wall_time;         // when the agent saw it
  std::string error_file = {};  // error file given to the worker; may not exist
  bool is_victim = false;       // its error record says that a peer failed first
  bool is_unprompted = false;   // as in Rendezvous::Failure
  // Time of the failure, as its error file says; InfinitePast: there is no such time.
  absl::Time said_at = absl::InfinitePast();
  // A description to use instead of the exit status, where that does not show the fault: "made no
  // step for 42s ...", "could not be started: ...", "let its timer 'load' run out".
  std::string instead = {};
  // The agent stopped the worker after an earlier failure, or the worker ended after the generation
  // was over. Not a failure of its own.
  bool was_stopped = false;
};

// Returns "exited with code 3" or "was killed by SIGKILL", and ExitStatus::cause.
std::string DescribeExit(const ExitStatus& status);

// Returns `instead` where it is set, else DescribeExit().
std::string DescribeFailure(const WorkerFailure& failure);

// Returns the exit code as a shell reports it: 128 + N for signal N.
int ShellExitCode(const ExitStatus& status);

// Returns "SIGKILL"; "signal 99" for a number without a name.
std::string SignalName(int signal);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
