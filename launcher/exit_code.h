#ifndef DDP_LAUNCHER_EXIT_CODE_H_
#define DDP_LAUNCHER_EXIT_CODE_H_

#include <string>

#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {

// What ddprun's exit code is to tell, as --exit-code names it.
enum class ExitCodeStyle {
  kDefault,  // as torchrun: 0 or 1
  kWorker,  // the root cause's own, 128 + N where signal N killed it; 1 where no worker is to blame
  kReason,  // one of ReasonCode
};

// The codes of --exit-code=reason. They never change their meaning; 2 is a mistake on the command
// line, and 128 + N the agent's own death by signal N, whatever --exit-code says.
enum ReasonCode : int {
  kReasonSucceeded = 0,
  kReasonWorkerFailed = 1,        // a worker failed and --max-restarts is 0
  kReasonCannotStart = 10,        // the program, a folder, a port: this node could not take part
  kReasonRendezvousTimeout = 11,  // not enough nodes came
  kReasonClosed = 12,             // another node ended the job, or it was over
  kReasonBudgetSpent = 13,        // all of --max-restarts
  kReasonNoProgress = 14,         // failures in a row without a step: restarting does not help
  kReasonPreempted = 15,          // a signal, or its node's share of it
  kReasonStoreLost = 16,          // the Redis server was out of reach for too long
};

// The codes and what they mean, for the help text: one per line, indented by two.
std::string ReasonCodesText();

// The exit code of a job that ended with `result`. Pure.
int ExitCodeOf(const elastic::JobResult& result, ExitCodeStyle style);

// That of a job that ended so before there was any worker.
int ExitCodeOf(elastic::JobEndReason end, ExitCodeStyle style);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_EXIT_CODE_H_
