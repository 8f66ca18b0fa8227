#ifndef DDP_ELASTIC_AGENT_JOB_RESULT_H_
#define DDP_ELASTIC_AGENT_JOB_RESULT_H_

#include <string>
#include <vector>

#include "elastic/agent/worker_failure.h"

namespace ddp::elastic {

// Why a job ended, as this node sees it.
enum class JobEndReason {
  kSucceeded,
  kWorkerFailed,       // the job had no restart budget
  kBudgetSpent,        // the budget of restarts, or of lost nodes, was spent
  kNoProgress,         // restarting does not help
  kClosed,             // the job was closed, or the rendezvous refused this node
  kRendezvousTimeout,  // not enough nodes joined
  kStoreLost,          // the store was out of reach for too long
  kPreempted,          // a signal stopped it
  kCannotStart,        // the program cannot be started, or a worker does not end by SIGKILL
};

// The result of a job on this node.
struct JobResult {
  JobEndReason end = JobEndReason::kSucceeded;
  int exit_code = 0;  // 0 or 1, as torchrun's exit code
  // Exit code of the root cause's process, on any node, as a shell reports it (128 + N for signal
  // N); 0: none, or not known.
  int root_exit_code = 0;
  // Failures of this node's last generation: the root cause if it is on this node; the others in
  // the order seen, then victims, then workers that the agent stopped. Empty when the job succeeded
  // or was stopped by a signal.
  std::vector<WorkerFailure> failures;
  // Set when the root cause is not in `failures`: the cause on one line, and the host of its worker
  // where known. Empty when `failures` begins with the root cause, and when nothing failed.
  std::string cause_elsewhere;
  std::string cause_host;
  // Why the job ended, one line for people without a full stop. Empty on success.
  std::string reason;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_JOB_RESULT_H_
