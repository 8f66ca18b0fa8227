#include "base/process/killed_processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/process/process_state.h"

namespace ddp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kMemory = 64 << 20;

// The signal does not matter to the class: this process ends step by step when it is told.
TEST(KilledProcessesTest, FollowsAProcessToItsEnd) {
  std::array<int, 2> orders{};
  std::array<int, 2> answers{};
  ASSERT_EQ(pipe(orders.data()), 0);
  ASSERT_EQ(pipe(answers.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    void* const memory =
        mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 1, kMemory);
    std::thread([&] {
      (void)!write(answers[1], "x", 1);
      char byte = 0;
      (void)!read(orders[0], &byte, 1);
      munmap(memory, kMemory);
      (void)!write(answers[1], "x", 1);
      for (;;) pause();
    }).detach();
    syscall(SYS_exit, 0);  // the main thread only
  }
  char byte = 0;
  ASSERT_EQ(read(answers[0], &byte, 1), 1);
  while (ProcessState(child) != 'Z') sched_yield();
  KilledProcesses killed;
  EXPECT_FALSE(killed.Look().has_value());
  killed.Add(child, "rank 1");
  std::optional<KilledProcesses::Finding> finding = killed.Look();
  ASSERT_TRUE(finding.has_value());
  EXPECT_THAT(
      finding->what,
      AllOf(StartsWith(absl::StrCat("rank 1 (pid ", child, ") is still being ended by the kernel")),
            HasSubstr(" MiB of memory")));
  EXPECT_FALSE(finding->progress);

  ASSERT_EQ(write(orders[1], "x", 1), 1);
  ASSERT_EQ(read(answers[0], &byte, 1), 1);
  finding = killed.Look();
  ASSERT_TRUE(finding.has_value());
  EXPECT_TRUE(finding->progress);  // less memory

  kill(child, SIGKILL);
  siginfo_t info = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(killed.Look().has_value());
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(killed.Remove(child));
  EXPECT_FALSE(killed.Remove(child));
}

}  // namespace
}  // namespace ddp
