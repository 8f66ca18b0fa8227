// Tests of the real ddprun in containers: a filter refuses system calls, processes are few, /proc
// is missing or another namespace's. A run does without, or ends with one line.

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/process/child_process.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/process/process_tree.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kRefuseCalls[] = "testing/refuse_calls";

std::string Runfile(const std::string& path) { return std::filesystem::absolute(path).string(); }

std::vector<std::string> Without(const std::string& call, int error) {
  return {Runfile(kRefuseCalls), absl::StrCat(error), call, "--"};
}

// Returns true when this machine allows what the command does.
bool Works(std::vector<std::string> command) {
  const std::vector<char*> argv = ExecPointers(command);
  const ChildProcess child = StartChild([&argv] {
    ::execvp(argv[0], argv.data());
    return errno;
  });
  int status = -1;
  return ::waitpid(child.pid, &status, 0) == child.pid && status == 0;
}

class RefusedCallsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Works({Runfile(kRefuseCalls), "1", "clone3", "--", "true"})) {
      GTEST_SKIP() << "filters of system calls are not allowed here";
    }
  }
};

TEST_F(RefusedCallsTest, WithoutMemfdCreateTheAgentSeesTheStepsOfItsWorkers) {
  const Folder folder;
  for (const int error : {EPERM, ENOSYS, EMFILE}) {
    const std::string log = folder / absl::StrCat("events-", error);
    const std::string end = folder / "end";
    std::ofstream(end).flush();
    DdprunDriver run({.arguments = {"--nproc-per-node=2", "--max-restarts=2",
                                    absl::StrCat("--event-log-file=", log),
                                    Runfile("launcher/end_to_end/stepping_worker"), "5", end},
                      .before = Without("memfd_create", error)});
    EXPECT_EQ(run.Wait(), 0) << run.err();
    EXPECT_EQ(run.err(), "");
    EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
    EXPECT_EQ(Count(Slurp(log), "first_step"), 2) << Slurp(log);
  }
}

TEST_F(RefusedCallsTest, WithoutPidfdOpenTheRunEndsWithOneLine) {
  DdprunDriver run({.arguments = Shell({}, "true"), .before = Without("pidfd_open", EPERM)});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(Lines(run.err()), ElementsAre(HasSubstr("pidfd_open: Operation not permitted")));
}

TEST_F(RefusedCallsTest, WithoutPidfdSendSignalWhatWorkersLeaveBehindEnds) {
  for (const int error : {EPERM, ENOSYS}) {
    DdprunDriver run({.arguments = Shell({}, "setsid sh -c 'sleep 1000 & sleep 1000' & echo done"),
                      .before = Without("pidfd_send_signal", error)});
    EXPECT_EQ(run.Wait(), 0) << run.err();
    EXPECT_EQ(run.err(), "");
    EXPECT_THAT(ChildrenOf(::getpid()), IsEmpty());
    EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
  }
}

TEST_F(RefusedCallsTest, WithoutThreadsTheRunEndsWithOneLine) {
  for (const int error : {EPERM, EAGAIN}) {
    DdprunDriver run(
        {.arguments = Shell({"--standalone"}, "true"), .before = Without("clone3", error)});
    EXPECT_EQ(run.Wait(), 1);
    EXPECT_THAT(Lines(run.err()),
                ElementsAre(AllOf(HasSubstr("cannot start a thread"), HasSubstr(strerror(error)))));
    EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
  }
}

constexpr char kStraysAreNotFound[] = "processes that workers leave behind are not found";

TEST(ProcTest, WhereProcIsMissingALineTellsThatStraysAreNotFound) {
  const std::string hide = "mount -t tmpfs none /proc && ";
  if (!Works({"unshare", "-m", "sh", "-c", hide + "true"})) {
    GTEST_SKIP() << "no mount namespace can be made here";
  }
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2"}, "setsid sleep 1000 >&- 2>&- & echo done"),
       .before = {"/usr/bin/unshare", "-m", "sh", "-c", hide + "exec \"$0\" \"$@\""}});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(Count(run.out(), "done\n"), 2);
  EXPECT_THAT(Lines(run.err()), ElementsAre(HasSubstr(kStraysAreNotFound)));
}

TEST(ProcTest, ProcOfAnotherNamespaceNamesNoProcessOfTheJob) {
  if (!Works({"unshare", "-p", "-f", "true"})) {
    GTEST_SKIP() << "no namespace of processes can be made here";
  }
  DdprunDriver run({.arguments = Shell({"--nproc-per-node=2"}, "setsid sleep 1000 & echo done"),
                    .before = {"/usr/bin/unshare", "-p", "-f"}});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(Count(run.out(), "done\n"), 2);
  EXPECT_THAT(Lines(run.err()), ElementsAre(HasSubstr(kStraysAreNotFound)));
}

}  // namespace
}  // namespace ddp::launcher
