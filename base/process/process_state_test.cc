#include "base/process/process_state.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(ProcessStateTest, FollowsAProcessToItsEnd) {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_NAME, "a) T (b");
    raise(SIGSTOP);
    for (;;) pause();
  }
  siginfo_t info = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WSTOPPED), 0);
  EXPECT_EQ(ProcessState(child), 'T');
  kill(child, SIGKILL);
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(ProcessState(child), 'Z');
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(ProcessState(child), '?');
  EXPECT_EQ(ProcessState(getpid()), 'R');
}

}  // namespace
}  // namespace ddp
