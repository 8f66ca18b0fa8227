#include "elastic/agent/worker_failure.h"

#include <signal.h>

#include "elastic/agent/process_spawner.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

ExitStatus KilledBy(int signal) {
  ExitStatus status;
  status.signal = signal;
  return status;
}

ExitStatus ExitedWith(int code) {
  ExitStatus status;
  status.exit_code = code;
  return status;
}

TEST(WorkerFailureTest, ExitIsDescribedByCodeOrSignal) {
  EXPECT_EQ(DescribeExit(ExitedWith(3)), "exited with code 3");
  EXPECT_EQ(DescribeExit(KilledBy(SIGKILL)), "was killed by SIGKILL");
}

TEST(WorkerFailureTest, ACauseThatIsKnownIsTold) {
  ExitStatus status = KilledBy(SIGKILL);
  status.cause = "out of memory: no more";
  EXPECT_EQ(DescribeExit(status), "was killed by SIGKILL, out of memory: no more");
}

TEST(WorkerFailureTest, FaultFoundByTheAgentReplacesTheExit) {
  WorkerFailure failure;
  failure.status = KilledBy(SIGKILL);
  EXPECT_EQ(DescribeFailure(failure), "was killed by SIGKILL");
  failure.instead = "made no step for 42s";
  EXPECT_EQ(DescribeFailure(failure), "made no step for 42s");
}

TEST(WorkerFailureTest, ShellAddsASignalTo128) {
  EXPECT_EQ(ShellExitCode(ExitedWith(0)), 0);
  EXPECT_EQ(ShellExitCode(ExitedWith(3)), 3);
  EXPECT_EQ(ShellExitCode(KilledBy(SIGTERM)), 128 + SIGTERM);
}

TEST(WorkerFailureTest, SignalWithoutANameIsNamedByItsNumber) {
  EXPECT_EQ(SignalName(SIGSEGV), "SIGSEGV");
  EXPECT_EQ(SignalName(99), "signal 99");
}

}  // namespace
}  // namespace ddp::elastic
