#include "ddp/comm/reports/process_identity.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(ProcessIdentityTest, SurvivesTheStore) {
  const auto self = ProcessIdentity::OfThisProcess();
  ASSERT_TRUE(self.has_value());
  const auto read = ProcessIdentity::Parse(self->Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->Serialize(), self->Serialize());
  EXPECT_EQ(read->pid, ::getpid());
  for (const char* bad : {"", "a b c d", "boot 1 2", "boot 1 -2 3", "boot 1 2 3 4", " 1 2 3"}) {
    EXPECT_FALSE(ProcessIdentity::Parse(bad).has_value()) << bad;
  }
}

TEST(ProcessIdentityTest, AProcessThatLivesHasNotEnded) {
  const auto self = ProcessIdentity::OfThisProcess();
  ASSERT_TRUE(self.has_value());
  EXPECT_FALSE(self->HasEnded(*self));
}

// A child sends its identity through a pipe. The test checks the child alive, dead and reaped.
TEST(ProcessIdentityTest, AProcessHasEndedBeforeItIsReaped) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = ProcessIdentity::OfThisProcess()->Serialize();
    if (::write(pipe[1], text.data(), text.size()) < 0) ::_exit(1);
    for (;;) ::pause();
  }
  char buffer[200];
  const ssize_t size = ::read(pipe[0], buffer, sizeof(buffer));
  ASSERT_GT(size, 0);
  const auto self = ProcessIdentity::OfThisProcess();
  const auto process = ProcessIdentity::Parse(std::string(buffer, static_cast<size_t>(size)));
  ASSERT_TRUE(self.has_value() && process.has_value());
  EXPECT_FALSE(process->HasEnded(*self));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  siginfo_t info;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(process->HasEnded(*self)) << "dead, and not reaped";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(process->HasEnded(*self)) << "reaped";
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(ProcessIdentityTest, AnotherHostOrNamespaceProvesNothing) {
  const auto self = ProcessIdentity::OfThisProcess();
  ASSERT_TRUE(self.has_value());
  ProcessIdentity reused = *self;
  reused.start_time += 1;
  EXPECT_TRUE(reused.HasEnded(*self)) << "a later process has its id";
  ProcessIdentity elsewhere = reused;
  elsewhere.boot = "another";
  EXPECT_FALSE(elsewhere.HasEnded(*self));
  ProcessIdentity inside = reused;
  inside.pid_space += 1;
  EXPECT_FALSE(inside.HasEnded(*self));
}

}  // namespace
}  // namespace ddp::internal
