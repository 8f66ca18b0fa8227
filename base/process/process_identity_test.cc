#include "base/process/process_identity.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

// Returns the identity of this process with another word at `place`.
std::string Changed(size_t place, const std::string& word) {
  std::vector<std::string> words = absl::StrSplit(ProcessIdentity(), ' ');
  words.at(place) = word;
  return absl::StrJoin(words, " ");
}

TEST(ProcessIdentityTest, AProcessThatLivesHasNotEnded) {
  EXPECT_NE(ProcessIdentity(), "");
  EXPECT_FALSE(ProcessHasEnded(ProcessIdentity()));
}

// A child sends its identity through a pipe. The test checks the child alive, dead and reaped.
TEST(ProcessIdentityTest, AProcessHasEndedBeforeItIsReaped) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = ProcessIdentity();
    if (::write(pipe[1], text.data(), text.size()) < 0) ::_exit(1);
    for (;;) ::pause();
  }
  char buffer[200];
  const ssize_t size = ::read(pipe[0], buffer, sizeof(buffer));
  ASSERT_GT(size, 0);
  const std::string process(buffer, static_cast<size_t>(size));
  EXPECT_FALSE(ProcessHasEnded(process));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  siginfo_t info;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(ProcessHasEnded(process)) << "dead, and not reaped";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(ProcessHasEnded(process)) << "reaped";
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(ProcessIdentityTest, AnotherHostOrNamespaceProvesNothing) {
  EXPECT_TRUE(ProcessHasEnded(Changed(3, "1"))) << "a later process has its id";
  for (const std::string& text :
       {Changed(0, "another"), Changed(1, "1"), Changed(2, "-2"), Changed(2, "x"),
        ProcessIdentity() + " 4", std::string(), std::string("a b c d")}) {
    EXPECT_FALSE(ProcessHasEnded(text)) << text;
  }
}

}  // namespace
}  // namespace ddp
