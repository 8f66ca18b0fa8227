#include "base/process/pidfd.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "testing/refused_calls.h"

namespace ddp {
namespace {

constexpr int kDeadlineMs = 30000;

bool IsReadable(const UniqueFd& fd, int timeout_ms) {
  pollfd polled{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return poll(&polled, 1, timeout_ms) == 1;
}

pid_t StartChildThatWaits() {
  const pid_t pid = fork();
  if (pid == 0) {
    while (true) pause();
  }
  return pid;
}

TEST(PidfdTest, IsReadableOnceTheProcessHasEnded) {
  const pid_t pid = StartChildThatWaits();
  ASSERT_GT(pid, 0);
  const UniqueFd pidfd = OpenPidfd(pid);
  ASSERT_TRUE(pidfd.valid());
  EXPECT_NE(fcntl(pidfd.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_FALSE(IsReadable(pidfd, 0));
  EXPECT_TRUE(SignalPidfd(pidfd.get(), pid, SIGKILL));
  EXPECT_TRUE(IsReadable(pidfd, kDeadlineMs));
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

TEST(PidfdTest, ReapedProcessCannotBeSignalled) {
  const pid_t pid = fork();
  if (pid == 0) _exit(0);
  ASSERT_GT(pid, 0);
  const UniqueFd pidfd = OpenPidfd(pid);
  ASSERT_TRUE(pidfd.valid());
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
  EXPECT_FALSE(SignalPidfd(pidfd.get(), pid, SIGKILL));
  EXPECT_EQ(errno, ESRCH);
  EXPECT_FALSE(OpenPidfd(pid).valid());
}

TEST(PidfdTest, WhereAFilterRefusesTheCallTheProcessGetsTheSignalByItsNumber) {
  const pid_t pid = StartChildThatWaits();
  ASSERT_GT(pid, 0);
  const UniqueFd pidfd = OpenPidfd(pid);
  bool refused = false;
  std::thread([&] {
    refused = testing::RefuseCalls({{SYS_pidfd_send_signal, EPERM}});
    EXPECT_TRUE(SignalPidfd(pidfd.get(), pid, SIGKILL));
    EXPECT_TRUE(IsReadable(pidfd, kDeadlineMs));
    EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
    // The number may mean another process by now.
    EXPECT_FALSE(SignalPidfd(pidfd.get(), getpid(), 0));
    EXPECT_EQ(errno, ESRCH);
  }).join();
  if (!refused) GTEST_SKIP() << "filters of system calls are not allowed here";
}

TEST(PidfdTest, ErrorsAreInErrno) {
  EXPECT_FALSE(OpenPidfd(-1).valid());
  EXPECT_EQ(errno, EINVAL);
  EXPECT_FALSE(SignalPidfd(-1, getpid(), 0));
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace ddp
