#include "launcher/flags/exit_code.h"

#include "absl/strings/str_cat.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {
namespace {

using elastic::JobEndReason;

int CodeOfReason(JobEndReason reason) {
  switch (reason) {
    case JobEndReason::kSucceeded:
      return kReasonSucceeded;
    case JobEndReason::kWorkerFailed:
      return kReasonWorkerFailed;
    case JobEndReason::kBudgetSpent:
      return kReasonBudgetSpent;
    case JobEndReason::kNoProgress:
      return kReasonNoProgress;
    case JobEndReason::kClosed:
      return kReasonClosed;
    case JobEndReason::kRendezvousTimeout:
      return kReasonRendezvousTimeout;
    case JobEndReason::kStoreLost:
      return kReasonStoreLost;
    case JobEndReason::kPreempted:
      return kReasonPreempted;
    case JobEndReason::kCannotStart:
      return kReasonCannotStart;
  }
  return kReasonWorkerFailed;
}

// Returns the root cause's exit code as a shell has it; 1 when there is none or its code is
// unknown.
int CodeOfWorker(const elastic::JobResult& result) {
  int code = result.root_exit_code;
  if (code == 0 && !result.failures.empty()) {
    code = elastic::ShellExitCode(result.failures.front().status);
  }
  return code > 0 && code < 256 ? code : 1;
}

struct Meaning {
  ReasonCode code;
  const char* text;
};

constexpr Meaning kMeanings[] = {
    {kReasonWorkerFailed, "a worker failed, and there were no restarts to spend"},
    {kReasonCannotStart, "this node could not take part: the program, a folder, a port"},
    {kReasonRendezvousTimeout, "not enough nodes came in time"},
    {kReasonClosed, "another node ended the job, or it was over"},
    {kReasonBudgetSpent,
     "a worker failed or a node was lost, and all of --max-restarts or --max-node-losses were"
     " spent"},
    {kReasonNoProgress, "failures in a row without a step (--no-progress-limit)"},
    {kReasonPreempted, "ddprun was told to stop by a signal"},
    {kReasonStoreLost, "the Redis server was out of reach for too long"},
};

}  // namespace

std::string ReasonCodesText() {
  std::string text;
  for (const Meaning& meaning : kMeanings) {
    absl::StrAppend(&text, "  ", absl::Dec(meaning.code, absl::kSpacePad2), "  ", meaning.text,
                    "\n");
  }
  return text;
}

int ExitCodeOf(const elastic::JobResult& result, ExitCodeStyle style) {
  if (result.end == JobEndReason::kSucceeded && result.exit_code == 0) return 0;
  switch (style) {
    case ExitCodeStyle::kWorker:
      return CodeOfWorker(result);
    case ExitCodeStyle::kReason:
      // A result that was never filled in must not count as a success.
      return result.end == JobEndReason::kSucceeded ? int{kReasonWorkerFailed}
                                                    : CodeOfReason(result.end);
    case ExitCodeStyle::kDefault:
      break;
  }
  return 1;
}

int ExitCodeOf(JobEndReason end, ExitCodeStyle style) {
  elastic::JobResult result;
  result.end = end;
  result.exit_code = end == JobEndReason::kSucceeded ? 0 : 1;
  return ExitCodeOf(result, style);
}

}  // namespace ddp::launcher
