#include "testing/ranks/rank_harness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/process/pidfd.h"
#include "base/unique_fd.h"

namespace ddp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "unset" : value;
}

int PrintEnvironment() {
  for (const char* name : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                           "DDP_STORE", "DDP_GENERATION", "EXTRA"}) {
    printf("%s=%s\n", name, Variable(name).c_str());
  }
  fprintf(stderr, "on stderr\n");
  return 0;
}

int FailACheck() {
  EXPECT_EQ(Variable("RANK"), "0") << "only rank 0 is content";
  return 0;
}

int ExitWithRank() {
  int rank = 0;
  return absl::SimpleAtoi(Variable("RANK"), &rank) ? 10 + rank : 1;
}

int WaitForever() {
  printf("waiting\n");
  fflush(stdout);
  while (true) pause();
}

int FailOrWaitForever() { return Variable("RANK") == "1" ? 3 : WaitForever(); }

int LeaveAChild() {
  const pid_t child = fork();
  if (child == 0) return WaitForever();
  printf("child %d\n", child);
  return 0;
}

int ListenOnMasterPort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(Variable("MASTER_PORT"), &port));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(fd, 1), 0);
  return 0;
}

int WriteMuch() {
  for (int i = 0; i < 100'000; ++i) printf("line %06d\n", i);
  return 0;
}

// Waits until `pid` has ended and some process has reaped it.
bool HasEnded(pid_t pid) {
  const UniqueFd pidfd = OpenPidfd(pid);
  if (!pidfd.valid()) return true;
  pollfd exit{pidfd.get(), POLLIN, 0};
  return poll(&exit, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1;
}

TEST(RankHarnessTest, GivesEveryRankTorchrunsEnvironment) {
  const RankRun run = RunRanks({.world_size = 2,
                                .body = "print_environment",
                                .store_url = "unix:///s?prefix=p",
                                .environment = {{"EXTRA", "more"}}});
  ASSERT_TRUE(run.succeeded()) << run.Describe();
  ASSERT_EQ(run.ranks.size(), 2);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(run.ranks[rank].output,
                AllOf(HasSubstr(absl::StrCat("RANK=", rank, "\nLOCAL_RANK=", rank, "\n")),
                      HasSubstr("WORLD_SIZE=2\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\n"),
                      HasSubstr("DDP_STORE=unix:///s?prefix=p\nDDP_GENERATION=1\nEXTRA=more\n"),
                      HasSubstr("on stderr\n")));
  }
}

TEST(RankHarnessTest, AVariableSetToNothingIsRemoved) {
  setenv("EXTRA", "inherited", 1);
  const RankRun run = RunRanks({.body = "print_environment", .environment = {{"EXTRA", ""}}});
  unsetenv("EXTRA");
  EXPECT_THAT(run.Describe(), AllOf(HasSubstr("EXTRA=unset"), HasSubstr("DDP_STORE=unset")));
}

TEST(RankHarnessTest, AFailedCheckFailsTheRankAndShowsItsOutput) {
  const RankRun run = RunRanks({.world_size = 2, .body = "fail_a_check"});
  EXPECT_FALSE(run.succeeded());
  EXPECT_TRUE(run.ranks[0].succeeded()) << run.Describe();
  EXPECT_EQ(run.ranks[1].exit_code, 1);
  EXPECT_THAT(run.Describe(), HasSubstr("only rank 0 is content"));
}

TEST(RankHarnessTest, ReportsEveryExitCode) {
  const RankRun run = RunRanks({.world_size = 3, .body = "exit_with_rank"});
  ASSERT_EQ(run.ranks.size(), 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(run.ranks[rank].exit_code, 10 + rank);
  EXPECT_THAT(run.Describe(), HasSubstr("exited with code 12"));
}

TEST(RankHarnessTest, ASignalledRankIsReportedWithItsSignal) {
  auto group = RankGroup::Start({.world_size = 2, .body = "wait_forever"});
  ASSERT_TRUE(group.ok()) << group.status();
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE((*group)->WaitForOutput(rank, "waiting\n", kPatience).ok());
    (*group)->Signal(rank, rank == 0 ? SIGKILL : SIGTERM);
  }
  const RankRun run = (*group)->Wait();
  EXPECT_EQ(run.ranks[0].signal, SIGKILL);
  EXPECT_EQ(run.ranks[1].signal, SIGTERM);
  EXPECT_FALSE(run.ranks[0].timed_out);
  EXPECT_THAT(run.Describe(), HasSubstr("was killed by SIGTERM (15)"));
}

TEST(RankHarnessTest, ADeadlineKillsWhatStillRuns) {
  const RankRun run =
      RunRanks({.world_size = 2, .body = "wait_forever", .deadline = absl::Milliseconds(1)});
  EXPECT_TRUE(run.ranks[0].timed_out);
  EXPECT_TRUE(run.ranks[1].timed_out);
  EXPECT_THAT(run.Describe(), HasSubstr("was killed by the harness at its deadline"));
}

TEST(RankHarnessTest, AFailureShortensTheDeadlineOfTheOthers) {
  const RankRun run = RunRanks({.world_size = 3,
                                .body = "fail_or_wait_forever",
                                .deadline = absl::Hours(24),
                                .deadline_after_failure = absl::ZeroDuration()});
  EXPECT_EQ(run.ranks[1].exit_code, 3);
  EXPECT_FALSE(run.ranks[1].timed_out);
  EXPECT_TRUE(run.ranks[0].timed_out);
  EXPECT_TRUE(run.ranks[2].timed_out);
}

TEST(RankHarnessTest, DestructionLeavesNoProcess) {
  std::set<pid_t> pids;
  {
    auto group = RankGroup::Start({.world_size = 3, .body = "wait_forever"});
    ASSERT_TRUE(group.ok()) << group.status();
    for (int rank = 0; rank < 3; ++rank) pids.insert((*group)->pid(rank));
  }
  EXPECT_EQ(pids.size(), 3);
  for (const pid_t pid : pids) EXPECT_EQ(kill(pid, 0), -1) << pid;
}

TEST(RankHarnessTest, AChildThatARankLeftBehindIsKilled) {
  const RankRun run = RunRanks({.body = "leave_a_child"});
  ASSERT_TRUE(run.succeeded()) << run.Describe();
  const size_t at = run.ranks[0].output.find("child ");
  ASSERT_NE(at, std::string::npos) << run.Describe();
  const pid_t child = atoi(run.ranks[0].output.c_str() + at + 6);
  ASSERT_GT(child, 0);
  EXPECT_TRUE(HasEnded(child));
}

TEST(RankHarnessTest, NoOutputIsLost) {
  const RankRun run = RunRanks({.world_size = 2, .body = "write_much"});
  ASSERT_TRUE(run.succeeded());
  for (const RankResult& rank : run.ranks) {
    EXPECT_EQ(rank.output.size(), 100'000 * 12);
    EXPECT_THAT(rank.output, HasSubstr("line 099999\n"));
  }
}

TEST(RankHarnessTest, ARankCanListenOnTheReservedPort) {
  EXPECT_TRUE(RanksSucceed({.body = "listen_on_master_port"}));
}

TEST(RankHarnessTest, WaitingForOutputOfAnEndedRankFailsAtOnce) {
  auto group = RankGroup::Start({.body = "exit_with_rank"});
  ASSERT_TRUE(group.ok()) << group.status();
  const absl::Status status = (*group)->WaitForOutput(0, "never", kPatience);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("exited with code 10 without writing"));
}

TEST(RankHarnessTest, RunsAnyProgram) {
  const RankRun run =
      RunRanks({.world_size = 2, .argv = {"sh", "-c", "echo rank $RANK of $WORLD_SIZE"}});
  ASSERT_TRUE(run.succeeded()) << run.Describe();
  EXPECT_EQ(run.ranks[1].output, "rank 1 of 2\n");
}

TEST(RankHarnessTest, AProgramThatCannotStartIsOneClearFailure) {
  const RankRun run = RunRanks({.world_size = 2, .argv = {"/no/such/program"}});
  EXPECT_FALSE(run.succeeded());
  EXPECT_THAT(run.Describe(), HasSubstr("cannot start /no/such/program: No such file"));
}

TEST(RankHarnessTest, AJobThatContradictsItselfIsRefused) {
  EXPECT_FALSE(RunRanks({.world_size = 0, .body = "print_environment"}).succeeded());
  EXPECT_FALSE(RunRanks({.world_size = 1}).succeeded());
  EXPECT_FALSE(RunRanks({.body = "print_environment", .argv = {"true"}}).succeeded());
}

TEST(RankHarnessTest, AnUnknownBodyIsNamed) {
  EXPECT_THAT(RunRanks({.body = "misspelt"}).Describe(), HasSubstr("no rank body \"misspelt\""));
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  using namespace ddp::testing;  // NOLINT: the table below is the whole of main
  ::testing::InitGoogleTest(&argc, argv);
  if (auto exit_code = RunRankBody({{"print_environment", PrintEnvironment},
                                    {"fail_a_check", FailACheck},
                                    {"exit_with_rank", ExitWithRank},
                                    {"wait_forever", WaitForever},
                                    {"fail_or_wait_forever", FailOrWaitForever},
                                    {"leave_a_child", LeaveAChild},
                                    {"listen_on_master_port", ListenOnMasterPort},
                                    {"write_much", WriteMuch}})) {
    return *exit_code;
  }
  return RUN_ALL_TESTS();
}
