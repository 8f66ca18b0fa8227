#include "base/process/close_on_exec.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <vector>

#include "testing/refused_calls.h"

namespace ddp {
namespace {

constexpr int kFirst = 3;
constexpr int kDescriptors = 300;  // more than one getdents64 returns

// Forks a child in which `refused` calls fail, and which opens many descriptors without FD_CLOEXEC.
// Returns the child's result: 0 success, 1 an open descriptor too many, 2 an error, 3 no seccomp
// here.
int TryWithout(const std::map<int, int>& refused) {
  const pid_t pid = fork();
  if (pid == 0) {
    rlimit limit = {.rlim_cur = 512, .rlim_max = 512};
    setrlimit(RLIMIT_NOFILE, &limit);
    std::vector<int> opened;
    for (int i = 0; i < kDescriptors; ++i) opened.push_back(dup(STDERR_FILENO));
    if (!refused.empty() && !testing::RefuseCalls(refused)) _exit(3);
    if (SetCloseOnExecFrom(kFirst) != 0) _exit(2);
    for (const int fd : opened) {
      if (fd < kFirst || (fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0) _exit(1);
    }
    _exit((fcntl(STDERR_FILENO, F_GETFD) & FD_CLOEXEC) != 0 ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(CloseOnExecTest, OnThisKernel) { EXPECT_EQ(TryWithout({}), 0); }

TEST(CloseOnExecTest, BeforeLinux511) {
  const int result = TryWithout({{SYS_close_range, ENOSYS}});
  if (result == 3) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

TEST(CloseOnExecTest, BeforeLinux511AndWithoutProc) {
  const int result = TryWithout({{SYS_close_range, ENOSYS}, {SYS_getdents64, ENOSYS}});
  if (result == 3) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace ddp
