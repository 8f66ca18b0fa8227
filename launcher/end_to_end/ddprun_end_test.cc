// Tests of how a run of the real ddprun ends: signals, SIGKILL of any of its processes, a lost
// Redis server. No process and no folder may be left in any case.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/process/process_state.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/process/process_tree.h"
#include "testing/network/loopback_socket.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// A worker with a child, a grandchild that has left its session, a process below that, and a
// process whose parent has ended. It prints "ready" when all of them run.
constexpr char kFamily[] =
    "sleep 1000 & "
    "setsid sh -c 'sleep 1000 & setsid sleep 1000 & echo ready; wait' & "
    "(setsid sh -c 'echo ready; exec sleep 1000' &) ; "
    "echo worker $$; echo ready; wait";
constexpr int kReadyPerWorker = 3;
constexpr int kProcessesPerWorker = 6;

std::string NameOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/comm"));
  std::string name;
  std::getline(file, name);
  return name;
}

std::string CommandLineOf(pid_t pid) {
  std::stringstream text;
  text << std::ifstream(absl::StrCat("/proc/", pid, "/cmdline")).rdbuf();
  return text.str();
}

// A run whose workers have the family above, with all its processes.
class FamilyTest : public ::testing::Test {
 protected:
  FamilyTest()
      : FamilyTest(Shell({"--standalone", "--nproc-per-node=2", "--max-restarts=3"}, kFamily)) {}

  explicit FamilyTest(const std::vector<std::string>& arguments) : run_({.arguments = arguments}) {
    run_.AwaitStdout("ready", 2 * kReadyPerWorker);
    agent_ = run_.AgentPid();
    // The last sleeps may still be between fork and exec; no other process is to appear.
    const size_t expected = 2 /* ddprun */ + 1 /* redis */ + 2 * kProcessesPerWorker;
    const absl::Time deadline = MonotonicClock().Now() + DdprunDriver::kDeadline;
    std::vector<pid_t> tree = run_.Tree();
    while (tree.size() < expected && MonotonicClock().Now() < deadline) tree = run_.Tree();
    EXPECT_EQ(tree.size(), expected);
    for (const pid_t pid : tree) {
      everybody_.emplace_back(pid);
      if (NameOf(pid) == "redis-server") redis_ = pid;
      const std::string line = absl::StrCat("worker ", pid, "\n");
      if (Count(run_.out(), line) != 0) workers_.push_back(pid);
    }
  }

  void ExpectNoProcessIsLeft() {
    const absl::Time deadline = MonotonicClock().Now() + DdprunDriver::kDeadline;
    for (const HeldProcess& process : everybody_) {
      EXPECT_TRUE(process.AwaitEnd(deadline)) << process.pid() << " " << NameOf(process.pid());
    }
  }

  void ExpectNothingIsLeft() {
    ExpectNoProcessIsLeft();
    EXPECT_THAT(run_.TemporaryEntries(), IsEmpty());
  }

  DdprunDriver run_;
  pid_t agent_ = -1;
  pid_t redis_ = -1;
  std::vector<pid_t> workers_;
  std::vector<HeldProcess> everybody_;
};

TEST_F(FamilyTest, SigkillOfTheKeeperLeavesNothing) {
  ::kill(run_.pid(), SIGKILL);
  EXPECT_EQ(run_.Wait(), -SIGKILL);
  ExpectNothingIsLeft();
}

TEST_F(FamilyTest, SigkillOfTheAgentLeavesNothing) {
  ::kill(agent_, SIGKILL);
  EXPECT_EQ(run_.Wait(), 128 + SIGKILL);
  EXPECT_THAT(run_.err(),
              HasSubstr(absl::StrCat("the agent (pid ", agent_, ") was killed by SIGKILL")));
  ExpectNothingIsLeft();
}

TEST_F(FamilyTest, ACrashOfTheAgentLeavesNothing) {
  ::kill(agent_, SIGABRT);
  EXPECT_EQ(run_.Wait(), 128 + SIGABRT);
  ExpectNothingIsLeft();
}

TEST_F(FamilyTest, SigkillOfTheProcessGroupLeavesNothing) {
  ::kill(-run_.pid(), SIGKILL);
  EXPECT_EQ(run_.Wait(), -SIGKILL);
  ExpectNothingIsLeft();
}

TEST_F(FamilyTest, AKillByNameDoesNotTakeBoth) {
  EXPECT_EQ(NameOf(run_.pid()), "ddprun");
  EXPECT_EQ(NameOf(agent_), "ddp-agent");
  EXPECT_THAT(CommandLineOf(agent_), Not(HasSubstr("ddprun")));
  ::kill(run_.pid(), SIGTERM);
  EXPECT_EQ(run_.Wait(), 1);
  ExpectNothingIsLeft();
}

TEST_F(FamilyTest, SigkillOfAWorkerEndsItsFamilyBeforeTheNextGeneration) {
  ASSERT_EQ(workers_.size(), 2U);
  ::kill(workers_[0], SIGKILL);
  run_.AwaitStderr("restart 1 of 3: generation 2: ");
  run_.AwaitStdout("ready", 4 * kReadyPerWorker);
  // Only ddprun and Redis are left of the first generation.
  for (const HeldProcess& process : everybody_) {
    const bool stays =
        process.pid() == run_.pid() || process.pid() == agent_ || process.pid() == redis_;
    EXPECT_EQ(process.AwaitEnd(absl::InfinitePast()), !stays) << process.pid();
  }
  ::kill(run_.pid(), SIGINT);
  EXPECT_EQ(run_.Wait(), 1);
  ExpectNothingIsLeft();
}

TEST_F(FamilyTest, ALostRedisServerIsReplacedAndTheJobGoesOn) {
  ASSERT_GT(redis_, 0);
  ASSERT_EQ(workers_.size(), 2U);
  ::kill(redis_, SIGKILL);
  run_.AwaitStderr("the private Redis server died: started another one");
  ::kill(workers_[1], SIGKILL);
  run_.AwaitStderr("restart 1 of 3: generation 2: ");
  run_.AwaitStdout("ready", 4 * kReadyPerWorker);
  ::kill(run_.pid(), SIGTERM);
  EXPECT_EQ(run_.Wait(), 1);
  ExpectNothingIsLeft();
}

// The same family, whose stderr goes to files in a temporary folder.
class RedirectedFamilyTest : public FamilyTest {
 protected:
  RedirectedFamilyTest()
      : FamilyTest(Shell({"--standalone", "--nproc-per-node=2", "--redirects=2"},
                         absl::StrCat("echo to be read >&2; ", kFamily))) {}

  // Expects that the files are there, and that a line names their folder.
  void ExpectOnlyTheOutputIsLeft() {
    ExpectNoProcessIsLeft();
    ASSERT_THAT(run_.TemporaryEntries(), ElementsAre(StartsWith("ddprun_logs_")));
    const std::string folder =
        absl::StrCat(run_.temporary_folder(), "/", run_.TemporaryEntries()[0]);
    EXPECT_THAT(run_.err(), HasSubstr(absl::StrCat("the workers' output is in ", folder, " ")));
    EXPECT_EQ(Slurp(RunFolder(folder) / "attempt_0/0/stderr.log"), "to be read\n");
  }
};

TEST_F(RedirectedFamilyTest, ACrashOfTheAgentKeepsTheWorkersOutput) {
  ::kill(agent_, SIGABRT);
  EXPECT_EQ(run_.Wait(), 128 + SIGABRT);
  ExpectOnlyTheOutputIsLeft();
}

TEST_F(RedirectedFamilyTest, SigkillOfTheKeeperKeepsTheWorkersOutput) {
  ::kill(run_.pid(), SIGKILL);
  EXPECT_EQ(run_.Wait(), -SIGKILL);
  ExpectOnlyTheOutputIsLeft();
}

TEST(DdprunEndTest, WhatWorkersLeaveBehindEndsWithTheJob) {
  DdprunDriver run({.arguments = Shell({},
                                       "(setsid sh -c 'echo ready; exec sleep 1000' &) ; "
                                       "setsid sleep 1000 & echo done")});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_THAT(ChildrenOf(::getpid()), IsEmpty());
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

// Workers with a trap wait without a child: a shell may miss a signal that comes while it starts
// one.
class SignalTest : public ::testing::TestWithParam<int> {};

TEST_P(SignalTest, IsForwardedToTheWorkersWhichEndInOrder) {
  const int signal = GetParam();
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2", "--shutdown-timeout=1000", "--max-restarts=3"},
                          "for s in TERM INT HUP QUIT; do trap \"echo got $s; exit 5\" $s; done;"
                          "echo ready; while :; do :; done")});
  run.AwaitStdout("ready", 2);
  ::kill(run.pid(), signal);
  EXPECT_EQ(run.Wait(), 1);
  const std::map<int, std::string> names = {
      {SIGTERM, "TERM"}, {SIGINT, "INT"}, {SIGHUP, "HUP"}, {SIGQUIT, "QUIT"}};
  EXPECT_EQ(Count(run.out(), "got " + names.at(signal)), 2) << run.out();
  EXPECT_THAT(run.err(), AllOf(HasSubstr("SIG" + names.at(signal)), Not(HasSubstr("restart"))));
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, SignalTest, ::testing::Values(SIGTERM, SIGINT, SIGHUP, SIGQUIT));

// The worker answers late: an earlier second signal would be the same request.
TEST(DdprunEndTest, ASecondSignalKillsAtOnce) {
  DdprunDriver run({.arguments = Shell({"--shutdown-timeout=100000"},
                                       "trap 'sleep 0.6; echo no' INT; echo ready; "
                                       "while :; do :; done")});
  run.AwaitStdout("ready");
  ::kill(run.pid(), SIGINT);
  run.AwaitStdout("no");
  ::kill(run.pid(), SIGINT);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

// A worker that saves on any stop, until the file "late" exists. A test makes it when a signal that
// comes late is sent.
constexpr char kSaving[] =
    "save() { echo asked; until [ -e $TMPDIR/late ]; do :; done; echo saved; exit 0; }; "
    "trap save TERM INT HUP; echo ready; while :; do :; done";

void ExpectOneStopAndTimeToSave(const DdprunDriver& run) {
  EXPECT_EQ(Count(run.out(), "saved"), 2) << run.err();
  EXPECT_EQ(Count(run.out(), "asked"), 2) << run.out();
  EXPECT_THAT(run.out() + run.err(), Not(HasSubstr("killing")));
}

// A wrapper relays a signal that the terminal also sends, or sends another kind.
TEST(DdprunEndTest, AStopThatArrivesTwiceLeavesTimeToSave) {
  for (const std::vector<int>& signals : std::vector<std::vector<int>>{
           {SIGTERM, SIGTERM}, {SIGINT, SIGTERM}, {SIGTERM, SIGHUP}, {SIGINT, SIGINT}}) {
    for (const int gap_ms : {1, 20, 200}) {
      SCOPED_TRACE(absl::StrCat(signals[0], " and ", signals[1], " after ", gap_ms, " ms"));
      DdprunDriver run(
          {.arguments = Shell({"--nproc-per-node=2", "--shutdown-timeout=1000"}, kSaving)});
      run.AwaitStdout("ready", 2);
      ::kill(run.pid(), signals[0]);
      ::poll(nullptr, 0, gap_ms);
      ::kill(run.pid(), signals[1]);
      std::ofstream(run.temporary_folder() + "/late");
      EXPECT_EQ(run.Wait(), 1);
      ExpectOneStopAndTimeToSave(run);
    }
  }
}

// The same for workers that ddprun asks through their pages. The save outlasts the gap.
TEST(DdprunEndTest, AStopThatArrivesTwiceLeavesTimeToSaveAfterTheCommonStep) {
  for (const std::vector<int>& signals :
       std::vector<std::vector<int>>{{SIGTERM, SIGTERM}, {SIGINT, SIGTERM}, {SIGTERM, SIGHUP}}) {
    DdprunDriver run(
        {.arguments = {"--nproc-per-node=2",
                       std::filesystem::absolute("launcher/end_to_end/stepping_worker"), "1000000",
                       "no-such-file", "2", "10", "500"}});
    run.AwaitStdout("did step 2\n", 2);
    ::kill(run.pid(), signals[0]);
    ::poll(nullptr, 0, 200);
    ::kill(run.pid(), signals[1]);
    EXPECT_EQ(run.Wait(), 1);
    EXPECT_EQ(Count(run.out(), "saved"), 2) << run.err();
  }
}

// The terminal signals ddprun and the wrapper, and the wrapper relays the signal to ddprun.
TEST(DdprunEndTest, CtrlCUnderAWrapperLeavesTimeToSave) {
  constexpr char kTerminal[] = R"(
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
output = b""
pressed = False
while True:
    try:
        data = os.read(terminal, 4096)
    except OSError:
        break
    output += data
    os.write(1, data)
    if output.count(b"ready") == 2 and not pressed:
        pressed = True
        os.write(terminal, b"\x03")
    if output.count(b"asked") == 2:
        open(os.environ["TMPDIR"] + "/late", "w")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))";
  for (const std::vector<std::string>& wrapper : std::vector<std::vector<std::string>>{
           {"timeout", "--foreground", "600"}, {"timeout", "600"}}) {
    SCOPED_TRACE(wrapper[1]);
    std::vector<std::string> before = {"/usr/bin/env", "python3", "-c", kTerminal};
    before.insert(before.end(), wrapper.begin(), wrapper.end());
    DdprunDriver run(
        {.arguments = Shell({"--nproc-per-node=2", "--shutdown-timeout=1000"}, kSaving),
         .before = before});
    EXPECT_EQ(run.Wait(), 1);
    ExpectOneStopAndTimeToSave(run);
  }
}

// Schedulers and service managers signal every process. Two copies that reach the agent count as
// one signal.
TEST(DdprunEndTest, ASignalToEveryProcessOfTheJobLeavesTimeToSave) {
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2", "--shutdown-timeout=1000"},
                          "save() { i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; "
                          "echo saved; exit 0; }; trap save TERM; echo ready; "
                          "while :; do :; done")});
  run.AwaitStdout("ready", 2);
  for (const pid_t pid : run.Tree()) ::kill(pid, SIGTERM);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_EQ(Count(run.out(), "saved"), 2) << run.err();
  EXPECT_THAT(run.err(), Not(HasSubstr("killing")));
}

// Ctrl-Z, then fg.
TEST(DdprunEndTest, ACtrlZStopsTheWholeJobUntilItContinues) {
  DdprunDriver run({.arguments = Shell({"--standalone", "--nproc-per-node=2"},
                                       "echo worker $$; until [ -e $TMPDIR/end ]; do :; done")});
  run.AwaitStdout("worker", 2);
  std::vector<pid_t> workers;
  for (const pid_t pid : run.Tree()) {
    if (Count(run.out(), absl::StrCat("worker ", pid, "\n")) != 0) workers.push_back(pid);
  }
  ASSERT_EQ(workers.size(), 2U);
  ::kill(run.pid(), SIGTSTP);
  siginfo_t stopped{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(run.pid()), &stopped, WSTOPPED), 0);
  EXPECT_EQ(stopped.si_status, SIGTSTP);
  run.AwaitStderr("the workers are stopped until SIGCONT (fg)");
  for (const pid_t worker : workers) {
    const absl::Time deadline = MonotonicClock().Now() + DdprunDriver::kDeadline;
    while (ProcessState(worker) != 'T' && MonotonicClock().Now() < deadline) {
    }
    EXPECT_EQ(ProcessState(worker), 'T');
  }
  EXPECT_NE(ProcessState(run.AgentPid()), 'T');
  ::kill(run.pid(), SIGCONT);
  run.AwaitStderr("the workers go on after");
  std::ofstream(run.temporary_folder() + "/end");
  EXPECT_EQ(run.Wait(), 0);
}

TEST(DdprunEndTest, AStubbornWorkerIsKilledAfterTheShutdownTimeout) {
  DdprunDriver run({.arguments = Shell({"--shutdown-timeout=0.2"},
                                       "trap '' TERM; echo ready; while :; do sleep 0.05; done")});
  run.AwaitStdout("ready");
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.Wait(), 1);
}

// A step takes longer than the timeout, and so does the save. Both are progress.
TEST(DdprunEndTest, WorkersThatGetOnHaveTimeForTheirStepsAndTheirSave) {
  DdprunDriver run({.arguments = {"--nproc-per-node=2", "--shutdown-timeout=1",
                                  std::filesystem::absolute("launcher/end_to_end/stepping_worker"),
                                  "1000000", "no-such-file", "2", "1200", "2500"}});
  run.AwaitStdout("did step 2\n", 2);
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_EQ(Count(run.out(), "saved"), 2) << run.err();
  EXPECT_THAT(run.err(), AllOf(HasSubstr("made progress"), Not(HasSubstr("SIGKILL"))));
}

TEST(DdprunEndTest, OfAKnownGraceTheAgentKeepsTimeForItsReport) {
  DdprunDriver run({.arguments = Shell({"--shutdown-timeout=1000", "--termination-grace=0.5"},
                                       "trap '' TERM; echo ready; while :; do sleep 0.05; done")});
  run.AwaitStdout("ready");
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), HasSubstr("at most 250ms"));
}

TEST(DdprunEndTest, AWorkerInUninterruptibleSleepIsNotStartedAgain) {
  DdprunDriver run({.arguments = {"--max-restarts=3", "--kill-timeout=20",
                                  std::filesystem::absolute("launcher/end_to_end/sleeping_worker")},
                    .environment = {{"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.5"}}});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), AllOf(HasSubstr("rank 0 was in uninterruptible sleep (state D)"),
                               Not(HasSubstr("restart"))));
}

// The workers have ended, and their output waits for a reader. The result stands.
TEST(DdprunEndTest, ASignalAfterTheEndOfTheWorkersEndsTheWaitForTheConsole) {
  std::array<int, 2> console{};
  ASSERT_EQ(::pipe2(console.data(), O_CLOEXEC), 0);
  const UniqueFd unread(console[0]);
  const UniqueFd full(console[1]);
  DdprunDriver run({.arguments = Shell({"--tee=1", "--event-log-handler=console"},
                                       "i=0; while [ $i -lt 20000 ]; do echo $i line of a worker; "
                                       "i=$((i + 1)); done"),
                    .stdout_fd = full.get()});
  run.AwaitStderr("job_finished");
  const HeldProcess ddprun(run.pid());
  ::kill(run.pid(), SIGINT);
  EXPECT_TRUE(ddprun.AwaitEnd(MonotonicClock().Now() + DdprunDriver::kDeadline / 2));
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_THAT(run.err(), HasSubstr("nobody reads the output"));
}

// Sends SIGINT to a ddprun whose Redis server never answers, so the signal arrives during the
// agent's preparations. Expects that ddprun ends.
void ExpectSigintEndsTheWaitForRedis(DdprunDriver::Options options) {
  const testing::LoopbackSocket deaf = testing::ListenOnLoopback();
  options.arguments =
      Shell({absl::StrCat("--rdzv-endpoint=127.0.0.1:", deaf.port), "-r3"}, "echo started");
  DdprunDriver run(options);
  pid_t agent = -1;
  while (agent < 0) {
    const std::vector<pid_t> children = ChildrenOf(run.pid());
    if (!children.empty()) agent = children[0];
  }
  ::kill(run.pid(), SIGINT);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_EQ(run.err(), "ddprun: stopped by SIGINT\n");
  EXPECT_EQ(run.out(), "");
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

TEST(DdprunEndTest, ASignalWhileRedisIsOutOfReachEndsTheRunAtOnce) {
  ExpectSigintEndsTheWaitForRedis({});
}

// A shell without job control starts background jobs with SIGINT ignored.
TEST(DdprunEndTest, ASignalThatTheShellIgnoresEndsTheWaitForRedisToo) {
  ExpectSigintEndsTheWaitForRedis({.before = {"/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh"}});
}

// ddprun may be the first process of a container: orphans of other processes become its children.
TEST(DdprunEndTest, TheKeeperReapsWhatEndsBelowItWhileTheJobRuns) {
  DdprunDriver::Options options;
  options.arguments = Shell({"--standalone"}, "echo ready; exec sleep 1000");
  // ddprun's process has a child from before its exec, and adopts another when that child ends.
  options.before = {"/bin/sh", "-c", "sh -c 'sleep 0.2 & sleep 0.1' & exec \"$@\"", "sh"};
  DdprunDriver run(options);
  run.AwaitStdout("ready");
  const absl::Time deadline = MonotonicClock().Now() + DdprunDriver::kDeadline;
  while (ChildrenOf(run.pid()).size() > 1 && MonotonicClock().Now() < deadline) {
    ::poll(nullptr, 0, 5);
  }
  EXPECT_EQ(ChildrenOf(run.pid()).size(), 1U);
  EXPECT_EQ(::kill(run.pid(), SIGTERM), 0);
  run.Wait();
}

}  // namespace
}  // namespace ddp::launcher
