#ifndef DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
#define DDP_ELASTIC_AGENT_WORKER_FAILURE_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::elastic {

// A worker that failed.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string role;
  pid_t pid = 0;
  ExitStatus status;
  absl::Time wall_time;         // when the agent saw it, for people
  std::string error_file = {};  // error file given to the worker; may not exist
  bool is_victim = false;       // its error record says that a peer failed first
  // The time of the failure in its error file; InfinitePast: no file has one.
  absl::Time said_at = absl::InfinitePast();
  // The fault of a worker that did not end by itself: "made no step for 42s ...", "could not be
  // started: ...", "let its timer 'load' run out".
  std::string instead = {};
  // The agent stopped the worker after an earlier failure, or the worker ended after the generation
  // was over. Not a failure of its own.
  bool was_stopped = false;
};

// Why a job ended, as this node sees it.
enum class JobEndReason {
  kSucceeded,
  kWorkerFailed,       // the job had no restart budget
  kBudgetSpent,        // the restart budget was spent
  kNoProgress,         // restarting does not help
  kClosed,             // another node could not take part, or the job had ended before
  kRendezvousTimeout,  // not enough nodes joined
  kStoreLost,          // the store was out of reach for too long
  kPreempted,          // by a signal
  kCannotStart,        // the program, or its environment, is at fault
};

// The result of a job on this node.
struct JobResult {
  JobEndReason end = JobEndReason::kSucceeded;
  int exit_code = 0;  // 0 or 1, as torchrun's exit code
  // Exit code of the root cause's process, on any node, as a shell reports it (128 + N for signal
  // N); 0: none, or not known.
  int root_exit_code = 0;
  // Failures of this node's last generation: the root cause if it is on this node; the others in
  // the order seen, then victims, then workers that the agent stopped. Empty when the job
  // succeeded, was stopped by a signal or could not be started.
  std::vector<WorkerFailure> failures;
  // Set when the root cause is not in `failures`: the cause on one line, and the host of its worker
  // where known. Empty when `failures` begins with the root cause, and when nothing failed.
  std::string cause_elsewhere;
  std::string cause_host;
  // Why the job ended, one line for people without a full stop. Empty on success.
  std::string reason;
};

// Returns "exited with code 3" or "was killed by SIGKILL".
std::string DescribeExit(const ExitStatus& status);

// Returns `instead` where it is set, else DescribeExit().
std::string DescribeFailure(const WorkerFailure& failure);

// Returns the exit code as a shell reports it: 128 + N for signal N.
int ShellExitCode(const ExitStatus& status);

// Returns "SIGKILL"; "signal 99" for a number without a name.
std::string SignalName(int signal);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
