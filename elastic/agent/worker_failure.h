#ifndef DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
#define DDP_ELASTIC_AGENT_WORKER_FAILURE_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::elastic {

// One worker that ended badly.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string role;
  pid_t pid = 0;
  ExitStatus status;
  absl::Time wall_time;         // when the agent saw it, for people
  std::string error_file = {};  // where the worker was told to describe its failure; may not exist
  bool is_victim = false;       // by its own account a peer failed first
  // When it failed, as its error file says; InfinitePast: no file says so.
  absl::Time said_at = absl::InfinitePast();
  // What it did instead of ending: "made no step for 42s ...", "could not be started: ...", "let
  // its timer 'load' run out".
  std::string instead = {};
  // By the agent, because of a failure before, or it ended when the generation was over already: no
  // failure of its own.
  bool was_stopped = false;
};

// Why a job ended for this node.
enum class JobEndReason {
  kSucceeded,
  kWorkerFailed,       // and the job had no restarts to spend
  kBudgetSpent,        // and the restarts were spent
  kNoProgress,         // restarting does not help
  kClosed,             // another node could not take part, or the job was over before
  kRendezvousTimeout,  // not enough nodes came
  kStoreLost,          // the rendezvous was out of reach for too long
  kPreempted,          // by a signal
  kCannotStart,        // the program or its place
};

// How a job ended on this node.
struct JobResult {
  JobEndReason end = JobEndReason::kSucceeded;
  int exit_code = 0;  // 0 or 1, as torchrun's
  // Of the process that is the root cause, on whatever node, as a shell has it (128 + N for
  // signals); 0 where there is none or it is not known.
  int root_exit_code = 0;
  // Of this node's last generation: the root cause where it is here, then the others in the order
  // in which they were seen, victims behind them; the workers that the agent stopped come last.
  // Empty when the job succeeded, was stopped by a signal or could not be started.
  std::vector<WorkerFailure> failures;
  // Where the root cause is none of `failures`: what it was, on one line, and the host of the
  // worker that it was, where that is known. Empty where `failures` begins with the root cause, and
  // where nothing failed.
  std::string cause_elsewhere;
  std::string cause_host;
  // One line for people, without a full stop: why the job ended. Empty on success.
  std::string reason;
};

// "exited with code 3", "was killed by SIGKILL".
std::string DescribeExit(const ExitStatus& status);

// The same, or what it did instead of ending.
std::string DescribeFailure(const WorkerFailure& failure);

// As a shell has it: 128 + N after signal N.
int ShellExitCode(const ExitStatus& status);

// "SIGKILL"; "signal 99" for a number without a name.
std::string SignalName(int signal);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_FAILURE_H_
