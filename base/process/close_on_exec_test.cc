#include "base/process/close_on_exec.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <initializer_list>
#include <vector>

namespace ddp {
namespace {

constexpr int kFirst = 3;
constexpr int kDescriptors = 300;  // more than one getdents64 returns

// Makes `calls` fail from now on, as on a kernel without them.
bool Forbid(std::initializer_list<int> calls, int error_number) {
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const int call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    filter.push_back(
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error_number)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog program = {.len = static_cast<unsigned short>(filter.size()), .filter = filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Forks a child in which `calls` fail, and which opens many descriptors without FD_CLOEXEC. Returns
// the child's result: 0 success, 1 an open descriptor too many, 2 an error, 3 no seccomp here.
int TryWithout(std::initializer_list<int> calls) {
  const pid_t pid = fork();
  if (pid == 0) {
    rlimit limit = {.rlim_cur = 512, .rlim_max = 512};
    setrlimit(RLIMIT_NOFILE, &limit);
    std::vector<int> opened;
    for (int i = 0; i < kDescriptors; ++i) opened.push_back(dup(STDERR_FILENO));
    if (calls.size() > 0 && !Forbid(calls, ENOSYS)) _exit(3);
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
  const int result = TryWithout({SYS_close_range});
  if (result == 3) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

TEST(CloseOnExecTest, BeforeLinux511AndWithoutProc) {
  const int result = TryWithout({SYS_close_range, SYS_getdents64});
  if (result == 3) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace ddp
