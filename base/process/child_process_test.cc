#include "base/process/child_process.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace ddp {
namespace {

constexpr int kDeadlineMs = 30000;

// Returns the exit code; 128 + N for signal N.
int Reap(const ChildProcess& child) {
  int status = 0;
  EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

ChildProcess StartShell(const std::string& script) {
  std::vector<std::string> argv = {"/bin/sh", "-c", script};
  const std::vector<char*> pointers = ExecPointers(argv);
  return StartChild([&pointers] {
    execv(pointers[0], pointers.data());
    return errno;
  });
}

TEST(ChildProcessTest, ProgramRuns) {
  const ChildProcess child = StartShell("exit 7");
  ASSERT_GT(child.pid, 0);
  EXPECT_EQ(child.failed_call, nullptr);
  EXPECT_EQ(ReadExecError(child.exec_error), 0);
  EXPECT_EQ(Reap(child), 7);
}

TEST(ChildProcessTest, ExecOfAnAbsentProgramGivesItsErrno) {
  const ChildProcess child = StartChild([] {
    char* const argv[] = {nullptr};
    execv("/no/such/program", argv);
    return errno;
  });
  ASSERT_GT(child.pid, 0);
  EXPECT_EQ(ReadExecError(child.exec_error), ENOENT);
  EXPECT_EQ(Reap(child), 127);
}

TEST(ChildProcessTest, ErrorPipeIsReadableOnlyAfterTheExec) {
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  const ChildProcess child = StartChild([&gate] {
    char byte = 0;
    (void)!read(gate[0], &byte, 1);
    return EACCES;
  });
  ASSERT_GT(child.pid, 0);
  pollfd polled{.fd = child.exec_error.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&polled, 1, 0), 0);
  ASSERT_EQ(write(gate[1], "x", 1), 1);
  EXPECT_EQ(poll(&polled, 1, kDeadlineMs), 1);
  EXPECT_EQ(ReadExecError(child.exec_error), EACCES);
  EXPECT_EQ(Reap(child), 127);
  close(gate[0]);
  close(gate[1]);
}

TEST(ChildProcessTest, ChildThatIsKilledBeforeItsExecHasNoError) {
  const ChildProcess child = StartChild([]() -> int {
    while (true) pause();
  });
  ASSERT_GT(child.pid, 0);
  kill(child.pid, SIGKILL);
  EXPECT_EQ(ReadExecError(child.exec_error), 0);
  EXPECT_EQ(Reap(child), 128 + SIGKILL);
}

TEST(ChildProcessTest, KernelKillsTheChildOfAThreadThatEnds) {
  ChildProcess child;
  std::thread([&child] {
    child = StartShell("kill -STOP $$");
    EXPECT_EQ(ReadExecError(child.exec_error), 0);
  }).join();
  ASSERT_GT(child.pid, 0);
  EXPECT_EQ(Reap(child), 128 + SIGKILL);
}

TEST(ChildProcessTest, MissingDescriptorIsReported) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const ChildProcess child = StartChild([] { return EINVAL; });
  const int error = errno;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(child.pid, -1);
  EXPECT_STREQ(child.failed_call, "pipe");
  EXPECT_EQ(error, EMFILE);
}

TEST(ChildProcessTest, PointersEndWithNull) {
  std::vector<std::string> strings = {"a", "b=c"};
  const std::vector<char*> pointers = ExecPointers(strings);
  ASSERT_EQ(pointers.size(), 3U);
  EXPECT_STREQ(pointers[0], "a");
  EXPECT_STREQ(pointers[1], "b=c");
  EXPECT_EQ(pointers[2], nullptr);
}

}  // namespace
}  // namespace ddp
