#include "launcher/process/process_tree.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <string>

#include "base/unique_fd.h"

namespace ddp::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kDeadline = absl::Seconds(60);

class ProcessTreeTest : public ::testing::Test {
 protected:
  ProcessTreeTest() {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    std::array<int, 2> fds{};
    EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
    read_.reset(fds[0]);
    write_.reset(fds[1]);
  }

  // Forks a child that runs `body`, reports it, and waits to be killed.
  pid_t Fork(const std::function<void()>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      body();
      Ready();
      while (true) ::pause();
    }
    return pid;
  }

  void Ready() const { (void)!::write(write_.get(), "r", 1); }
  void AwaitReady(int times) const {
    for (char c = 0; times > 0; --times) ASSERT_EQ(::read(read_.get(), &c, 1), 1);
  }

  UniqueFd read_, write_;
};

TEST_F(ProcessTreeTest, WithoutChildrenThereIsNothingToKill) {
  EXPECT_THAT(ChildrenOf(::getpid()), IsEmpty());
  EXPECT_TRUE(KillChildren({}, kDeadline));
}

TEST_F(ProcessTreeTest, KillsAllDescendantsWhateverTheirSession) {
  const pid_t child = Fork([this] {
    ::setsid();
    Fork([this] {
      ::setsid();
      Fork([] { ::setsid(); });
    });
    Fork([] {});
  });
  AwaitReady(4);
  EXPECT_THAT(ChildrenOf(::getpid()), ElementsAre(child));
  EXPECT_EQ(ChildrenOf(child).size(), 2U);
  EXPECT_TRUE(KillChildren({}, kDeadline));
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

TEST_F(ProcessTreeTest, KillsOrphansThatCameToUs) {
  const pid_t parent = Fork([this] {
    Fork([] { ::setsid(); });
    AwaitReady(1);
    ::_exit(0);
  });
  ASSERT_EQ(::waitpid(parent, nullptr, 0), parent);
  EXPECT_EQ(ChildrenOf(::getpid()).size(), 1U);
  EXPECT_TRUE(KillChildren({}, kDeadline));
  EXPECT_THAT(ChildrenOf(::getpid()), IsEmpty());
}

TEST_F(ProcessTreeTest, ChildrenOfAChildThatForksWithoutEnd) {
  // The child replaces itself without end; every copy lives for a moment only.
  Fork([this] {
    Ready();
    while (true) {
      if (::fork() != 0) ::_exit(0);
    }
  });
  AwaitReady(1);
  EXPECT_TRUE(KillChildren({}, kDeadline));
}

TEST_F(ProcessTreeTest, SparesTheSparedAndWhatIsBelowThem) {
  const pid_t spared = Fork([this] { Fork([] {}); });
  const pid_t other = Fork([] {});
  AwaitReady(3);
  EXPECT_TRUE(KillChildren({spared}, kDeadline));
  EXPECT_EQ(::kill(other, 0), -1);
  EXPECT_EQ(ChildrenOf(spared).size(), 1U);
  EXPECT_TRUE(KillChildren({}, kDeadline));
  EXPECT_THAT(ChildrenOf(::getpid()), IsEmpty());
}

TEST_F(ProcessTreeTest, ReapsOnlyWhatHasEnded) {
  const pid_t running = Fork([] {});
  const pid_t ended = ::fork();
  if (ended == 0) ::_exit(0);
  AwaitReady(1);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(ended), &info, WEXITED | WNOWAIT), 0);
  ReapChildren({ended});
  EXPECT_THAT(ChildrenOf(::getpid()), Contains(ended));
  ReapChildren({});
  EXPECT_THAT(ChildrenOf(::getpid()), ElementsAre(running));
  KillChildren({}, kDeadline);
}

}  // namespace
}  // namespace ddp::launcher
