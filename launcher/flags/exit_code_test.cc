#include "launcher/flags/exit_code.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <vector>

namespace ddp::launcher {
namespace {

using elastic::JobEndReason;
using elastic::JobResult;
using elastic::WorkerFailure;

JobResult Failed(JobEndReason end, int root_exit_code = 0) {
  JobResult result;
  result.end = end;
  result.exit_code = 1;
  result.root_exit_code = root_exit_code;
  return result;
}

WorkerFailure Failure(int exit_code, int signal) {
  WorkerFailure failure;
  failure.status.exit_code = exit_code;
  failure.status.signal = signal;
  return failure;
}

TEST(ExitCodeTest, SuccessIsZeroInEveryStyle) {
  for (const ExitCodeStyle style :
       {ExitCodeStyle::kDefault, ExitCodeStyle::kWorker, ExitCodeStyle::kReason}) {
    EXPECT_EQ(ExitCodeOf(JobResult(), style), 0);
  }
}

TEST(ExitCodeTest, ByDefaultEveryOtherEndIsOneAsWithTorchrun) {
  for (const JobEndReason end :
       {JobEndReason::kWorkerFailed, JobEndReason::kBudgetSpent, JobEndReason::kNoProgress,
        JobEndReason::kClosed, JobEndReason::kRendezvousTimeout, JobEndReason::kStoreLost,
        JobEndReason::kPreempted, JobEndReason::kCannotStart}) {
    EXPECT_EQ(ExitCodeOf(Failed(end, 85), ExitCodeStyle::kDefault), 1);
  }
}

TEST(ExitCodeTest, TheWorkersOwn) {
  const auto code = [](const JobResult& result) {
    return ExitCodeOf(result, ExitCodeStyle::kWorker);
  };
  EXPECT_EQ(code(Failed(JobEndReason::kBudgetSpent, 85)), 85);
  EXPECT_EQ(code(Failed(JobEndReason::kWorkerFailed, 128 + SIGSEGV)), 139);
  // The root cause's code is unknown: the code is that of the first failure here.
  JobResult here = Failed(JobEndReason::kWorkerFailed);
  here.failures = {Failure(0, SIGKILL), Failure(3, 0)};
  EXPECT_EQ(code(here), 137);
  // No worker is to blame.
  EXPECT_EQ(code(Failed(JobEndReason::kRendezvousTimeout)), 1);
  // An invalid exit code is not passed on, least of all as a success.
  EXPECT_EQ(code(Failed(JobEndReason::kBudgetSpent, 256)), 1);
  EXPECT_EQ(code(Failed(JobEndReason::kBudgetSpent, -9)), 1);
}

TEST(ExitCodeTest, TheReason) {
  const std::vector<std::pair<JobEndReason, int>> expected = {
      {JobEndReason::kWorkerFailed, 1},       {JobEndReason::kCannotStart, 10},
      {JobEndReason::kRendezvousTimeout, 11}, {JobEndReason::kClosed, 12},
      {JobEndReason::kBudgetSpent, 13},       {JobEndReason::kNoProgress, 14},
      {JobEndReason::kPreempted, 15},         {JobEndReason::kStoreLost, 16}};
  for (const auto& [end, code] : expected) {
    EXPECT_EQ(ExitCodeOf(Failed(end, 85), ExitCodeStyle::kReason), code);
  }
}

TEST(ExitCodeTest, AnEndBeforeThereWasAWorker) {
  EXPECT_EQ(ExitCodeOf(JobEndReason::kCannotStart, ExitCodeStyle::kDefault), 1);
  EXPECT_EQ(ExitCodeOf(JobEndReason::kCannotStart, ExitCodeStyle::kWorker), 1);
  EXPECT_EQ(ExitCodeOf(JobEndReason::kCannotStart, ExitCodeStyle::kReason), 10);
  EXPECT_EQ(ExitCodeOf(JobEndReason::kSucceeded, ExitCodeStyle::kReason), 0);
}

TEST(ExitCodeTest, AFailureThatNamesNoReasonIsNoSuccess) {
  EXPECT_EQ(ExitCodeOf(Failed(JobEndReason::kSucceeded), ExitCodeStyle::kReason), 1);
  EXPECT_EQ(ExitCodeOf(Failed(JobEndReason::kSucceeded), ExitCodeStyle::kDefault), 1);
}

}  // namespace
}  // namespace ddp::launcher
