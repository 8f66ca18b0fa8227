#ifndef DDP_LAUNCHER_FLAGS_EXIT_CODE_H_
#define DDP_LAUNCHER_FLAGS_EXIT_CODE_H_

#include <string>

#include "elastic/agent/job_result.h"

namespace ddp::launcher {

// Meaning of ddprun's exit code, as --exit-code names it.
enum class ExitCodeStyle {
  kDefault,  // 0 or 1, as torchrun
  kWorker,   // code of the root cause (128 + N for signal N); 1 when it is not known
  kReason,   // a ReasonCode
};

// Codes of --exit-code=reason. A code never changes its meaning. Whatever --exit-code says, ddprun
// exits with 2 after a mistake on the command line, and with 128 + N if a signal N that was not
// forwarded to the agent killed it.
enum ReasonCode : int {
  kReasonSucceeded = 0,
  kReasonWorkerFailed = 1,        // a worker failed and --max-restarts is 0
  kReasonCannotStart = 10,        // this node could not take part: the program, a folder, a port
  kReasonRendezvousTimeout = 11,  // not enough nodes joined
  kReasonClosed = 12,             // another node ended the job, or it had ended before
  kReasonBudgetSpent = 13,        // a worker failed and all of --max-restarts are spent
  kReasonNoProgress = 14,         // failures in a row without a step: restarting does not help
  kReasonPreempted = 15,          // a signal stopped this node
  kReasonStoreLost = 16,          // the Redis server was out of reach for too long
};

// Returns the codes and their meanings for the help text: one per line, indented by two.
std::string ReasonCodesText();

// Returns the exit code of a job that ended with `result`. Pure.
int ExitCodeOf(const elastic::JobResult& result, ExitCodeStyle style);

// Returns the exit code of a job that ended with `end` before it had any worker. Pure.
int ExitCodeOf(elastic::JobEndReason end, ExitCodeStyle style);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_EXIT_CODE_H_
