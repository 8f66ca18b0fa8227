// Length: all cases share the fixture, which starts real processes and leaves none behind.

#include "launcher/process/posix_process_spawner.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"
#include "testing/stalled_file.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kDeadline = absl::Seconds(60);

std::string Slurp(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

class PosixProcessSpawnerTest : public ::testing::Test {
 protected:
  PosixProcessSpawnerTest()
      : loop_(*EventLoop::Create()), router_(loop_.get(), console_.get(), console_.get()) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }

  void Make(PosixProcessSpawner::Options options = {}) {
    spawner_.reset();
    spawner_ = *PosixProcessSpawner::Create(loop_.get(), &router_, std::move(options));
  }

  static LogLayout Layout() { return *LogLayout::Create(::testing::TempDir() + "/logs", "run"); }

  absl::StatusOr<pid_t> Spawn(elastic::WorkerSpec spec) {
    ++running_;
    absl::StatusOr<pid_t> started = absl::UnknownError("no answer");
    bool answered = false;
    spawner_->Spawn(
        spec,
        [&](absl::StatusOr<pid_t> pid) {
          started = std::move(pid);
          answered = true;
          loop_->Stop();
        },
        [this](pid_t pid, elastic::ExitStatus status) {
          exits_[pid] = std::move(status);
          if (--running_ == 0) loop_->Stop();
        });
    while (!answered) RunLoop();
    if (!started.ok()) --running_;
    return started;
  }

  absl::StatusOr<pid_t> Shell(const std::string& script) {
    elastic::WorkerSpec spec;
    spec.role = "default";
    spec.argv = {"/bin/sh", "-c", script};
    return Spawn(spec);
  }

  // Runs the loop until every worker has ended.
  void Run() {
    while (running_ > 0) RunLoop();
  }

  // Runs the loop until a callback stops it.
  void RunLoop() {
    const auto timer = loop_->AddTimer(kDeadline, [] {
      ADD_FAILURE() << "the workers did not end";
      abort();
    });
    ASSERT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(timer);
  }

  std::unique_ptr<EventLoop> loop_;
  // The console has no reader: tests read the files.
  const UniqueFd console_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
  LogRouter router_;
  std::unique_ptr<PosixProcessSpawner> spawner_;
  std::map<pid_t, elastic::ExitStatus> exits_;
  int running_ = 0;
};

TEST_F(PosixProcessSpawnerTest, ExitCodesAndSignals) {
  Make();
  const pid_t good = *Shell("exit 0");
  const pid_t bad = *Shell("exit 3");
  const pid_t killed = *Shell("kill -KILL $$");
  Run();
  EXPECT_TRUE(exits_[good].succeeded());
  EXPECT_EQ(exits_[bad].exit_code, 3);
  EXPECT_EQ(exits_[bad].signal, 0);
  EXPECT_EQ(exits_[killed].signal, SIGKILL);
}

TEST_F(PosixProcessSpawnerTest, WhatCannotRunIsAnErrorAndLeavesNothing) {
  Make();
  elastic::WorkerSpec spec;
  spec.argv = {"/no/such/program"};
  EXPECT_TRUE(absl::IsNotFound(Spawn(spec).status()));
  spec.argv = {"/etc/passwd"};
  const auto status = Spawn(spec).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("/etc/passwd"));
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

// A shell would run these files as scripts, or run nothing and succeed.
TEST_F(PosixProcessSpawnerTest, WhatIsNoProgramIsNotGivenToAShell) {
  Make();
  const std::string path = ::testing::TempDir() + "/noprogram";
  const std::string other = ::testing::TempDir() + "/nointerpreter";
  std::ofstream(other) << "echo wrong\n";
  ASSERT_EQ(::chmod(other.c_str(), 0755), 0);
  elastic::WorkerSpec spec;
  spec.argv = {path};
  for (const auto& [contents, text] : std::map<std::string, std::string>{
           {"", "the file is empty"},
           {"\177ELF and more", "it is a program for another kind of machine"},
           {"echo wrong\n", "it is no program: a script needs a first line with #!"},
           {"#!\n", "it is no program: a script needs a first line with #!"},
           {absl::StrCat("#!", other, " -x\n"), absl::StrCat(other, ", which is no program")}}) {
    std::ofstream(path) << contents;
    ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
    const auto status = Spawn(spec).status();
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(HasSubstr("cannot run " + path), HasSubstr(text)));
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

TEST_F(PosixProcessSpawnerTest, AMissingInterpreterIsNamed) {
  Make();
  const std::string path = ::testing::TempDir() + "/badint";
  elastic::WorkerSpec spec;
  spec.argv = {path};
  for (const auto& [first_line, text] : std::map<std::string, std::string>{
           {"#! /no/such/interpreter -x\n", "the interpreter /no/such/interpreter, which is not"},
           {"#!/no/such/interpreter", "the interpreter /no/such/interpreter, which is not"},
           {"#!/bin/sh\r\nexit 0\r\n", "the interpreter /bin/sh and ends as on Windows"}}) {
    std::ofstream(path) << first_line;
    ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
    const auto status = Spawn(spec).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(HasSubstr("cannot run " + path), HasSubstr(text)));
  }
}

// Counts turns of the event loop, one each millisecond, and calls `what` at the 20th.
class Ticks {
 public:
  Ticks(EventLoop* loop, std::function<void()> what) : loop_(loop), what_(std::move(what)) {
    Tick();
  }
  int count() const { return count_; }

 private:
  void Tick() {
    if (++count_ == 20) return what_();
    loop_->AddTimer(absl::Milliseconds(1), [this] { Tick(); });
  }

  EventLoop* const loop_;
  const std::function<void()> what_;
  int count_ = 0;
};

class SlowStartTest : public PosixProcessSpawnerTest {
 protected:
  // Begins to start `argv`.
  void Begin(const std::vector<std::string>& argv) {
    elastic::WorkerSpec spec;
    spec.argv = argv;
    spawner_->Spawn(
        spec,
        [this](absl::StatusOr<pid_t> pid) {
          started_ = std::move(pid);
          loop_->Stop();
        },
        [this](pid_t pid, elastic::ExitStatus status) {
          exits_[pid] = std::move(status);
          loop_->Stop();
        });
  }

  static std::string MakeProgram() {
    std::string path = absl::StrCat(::testing::TempDir(), "/program-", ::getpid());
    std::ofstream(path) << "#!/bin/sh\nexit 7\n";
    EXPECT_EQ(::chmod(path.c_str(), 0755), 0);
    return path;
  }

  absl::StatusOr<pid_t> started_ = absl::UnknownError("no answer");
};

TEST_F(SlowStartTest, TheLoopGoesOnWhileExecIsSlow) {
  Make();
  const std::string program = MakeProgram();
  ::ddp::testing::StalledFile stalled(program);
  if (!stalled.stalls()) GTEST_SKIP() << "no leases on this file system";
  const Ticks ticks(loop_.get(), [&] { stalled.Release(); });
  Begin({program});
  RunLoop();
  ASSERT_TRUE(started_.ok()) << started_.status();
  EXPECT_EQ(ticks.count(), 20);
  if (!exits_.contains(*started_)) RunLoop();
  EXPECT_EQ(exits_[*started_].exit_code, 7);
}

TEST_F(SlowStartTest, AStartThatIsGivenUpLeavesNothing) {
  Make();
  const std::string program = MakeProgram();
  ::ddp::testing::StalledFile stalled(program);
  if (!stalled.stalls()) GTEST_SKIP() << "no leases on this file system";
  Begin({program});
  spawner_->CancelStart();
  bool gone = false;
  spawner_->KillStrays([&] {
    gone = true;
    loop_->Stop();
  });
  if (!gone) RunLoop();
  EXPECT_EQ(started_.status().message(), "no answer");
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  // The cancelled start does not delay the next one.
  EXPECT_TRUE(Shell("exit 0").ok());
  Run();
}

TEST_F(SlowStartTest, TheLoopGoesOnWhileAMountWithLogFilesIsStalled) {
  const auto files = *TaskThread::Create(loop_.get(), "worker-files");
  std::array<int, 2> gate{};
  ASSERT_EQ(::pipe2(gate.data(), O_CLOEXEC), 0);
  const auto stalled = std::make_shared<UniqueFd>(gate[0]);
  UniqueFd open_gate(gate[1]);
  files->Run([stalled] { (void)!::read(stalled->get(), std::string(1, '.').data(), 1); }, nullptr);
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.output.redirects.all = kStdout;
  options.files = files.get();
  Make(options);
  const Ticks ticks(loop_.get(), [&] { open_gate.reset(); });
  Begin({"/bin/echo", "here"});
  RunLoop();
  ASSERT_TRUE(started_.ok()) << started_.status();
  EXPECT_EQ(ticks.count(), 20);
  if (!exits_.contains(*started_)) RunLoop();
  EXPECT_EQ(Slurp(options.layout.root() + "/attempt_0/0/stdout.log"), "here\n");
  spawner_.reset();
}

TEST_F(SlowStartTest, AStartThatIsGivenUpBeforeItsFilesStartsNothing) {
  const auto files = *TaskThread::Create(loop_.get(), "worker-files");
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.files = files.get();
  Make(options);
  Begin({"/bin/sh", "-c", "exit 1"});
  spawner_->CancelStart();
  EXPECT_EQ(files->pending(), 1U);
  while (files->pending() > 0) {
    loop_->AddTimer(absl::Milliseconds(1), [&] { loop_->Stop(); });
    RunLoop();
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(started_.status().message(), "no answer");
  spawner_.reset();
}

TEST_F(PosixProcessSpawnerTest, TheWorkersWorld) {
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.output.redirects.all = kBothStreams;
  Make(options);
  const int inherited = ::memfd_create("inherited", MFD_CLOEXEC);
  const int other = ::open("/dev/null", O_RDONLY);  // inheritable, as a careless parent leaves it
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // as after `trap '' XFSZ`
  elastic::WorkerSpec spec;
  spec.local_rank = 12;
  spec.attempt = 3;
  spec.environment = {{"RANK", "12"}};
  spec.inherited_fds = {inherited};
  // Prints the kernel's view of this process.
  spec.argv = {
      "/bin/sh", "-c",
      "echo rank=$RANK arg=$1; echo file=$TORCHELASTIC_ERROR_FILE;"
      "echo session=$(cut -d' ' -f6 /proc/$$/stat) pid=$$;"
      "grep -E '^Sig(Blk|Ign):' /proc/self/status;"
      "cd /proc/$$/fd; for fd in *; do [ $fd -gt 2 ] && echo fd=$fd; done; echo to-err >&2",
      "sh", "x y"};
  const auto pid = Spawn(spec);
  ASSERT_TRUE(pid.ok()) << pid.status();
  Run();
  const std::string folder = absl::StrCat(options.layout.root(), "/attempt_3/12");
  const std::string out = Slurp(folder + "/stdout.log");
  EXPECT_THAT(out, HasSubstr("rank=12 arg=x y\n"));
  EXPECT_THAT(out, HasSubstr(absl::StrCat("file=", folder, "/error.json\n")));
  EXPECT_THAT(out, HasSubstr(absl::StrCat("session=", *pid, " pid=", *pid, "\n")));
  EXPECT_THAT(out, HasSubstr("SigBlk:\t0000000000000000"));
  // Only signals that a program can set are compared; the C library reserves two above them.
  const size_t ignored = out.find("SigIgn:\t");
  ASSERT_NE(ignored, std::string::npos);
  EXPECT_EQ(std::stoull(out.substr(ignored + 8, 16), nullptr, 16) & 0x7fffffff,
            1U << (SIGXFSZ - 1));
  EXPECT_THAT(out, HasSubstr(absl::StrCat("fd=", inherited, "\n")));
  EXPECT_THAT(out, ::testing::Not(HasSubstr(absl::StrCat("fd=", other, "\n"))));
  EXPECT_EQ(Slurp(folder + "/stderr.log"), "to-err\n");
  EXPECT_EQ(exits_[*pid].error_file, folder + "/error.json");
  ::close(inherited);
  ::close(other);
  ::signal(SIGXFSZ, SIG_DFL);
}

TEST_F(PosixProcessSpawnerTest, TeedOutputIsWholeWhenTheExitIsTold) {
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.output.tee.by_local_rank = {{0, kStdout}};
  Make(options);
  ASSERT_TRUE(Shell("seq 1 20000").ok());
  Run();
  const std::string out = Slurp(options.layout.root() + "/attempt_0/0/stdout.log");
  EXPECT_THAT(out, ::testing::EndsWith("\n20000\n"));
  EXPECT_EQ(out.size(), 108894U);
}

TEST_F(PosixProcessSpawnerTest, ANewGenerationOfAnAttemptHasFilesOfItsOwn) {
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.output.redirects.all = kStdout;
  Make(options);
  for (const uint64_t generation : {1, 2}) {
    elastic::WorkerSpec spec;
    spec.generation = generation;
    spec.argv = {"/bin/sh", "-c", absl::StrCat("echo generation ", generation)};
    ASSERT_TRUE(Spawn(spec).ok());
    Run();
  }
  EXPECT_EQ(Slurp(options.layout.root() + "/attempt_0/0/stdout.log"), "generation 1\n");
  EXPECT_EQ(Slurp(options.layout.root() + "/attempt_0.g2/0/stdout.log"), "generation 2\n");
}

TEST_F(PosixProcessSpawnerTest, LinesThatMatchAFilterAreThereTwice) {
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.host = "a-12";
  options.output.tee.all = kBothStreams;
  options.output.local_ranks_filter = {0, 1};
  options.output.filters_of_stdout = {"loss", "a,b"};
  options.output.filters_of_stderr = {"warn"};
  options.output.prefix_template = "${hostname} ${role_name}${local_rank}/${rank}> ";
  Make(options);
  for (const int local_rank : {0, 1, 2}) {
    elastic::WorkerSpec spec;
    spec.local_rank = local_rank;
    spec.rank = 10 + local_rank;
    spec.role = "r";
    spec.argv = {"/bin/sh", "-c", "echo loss 1; echo x; printf a,b; echo warn 1 >&2"};
    ASSERT_TRUE(Spawn(spec).ok());
    Run();
    spawner_->AwaitStrays();  // ends the streams, and so the last line
  }
  const std::string attempt = options.layout.root() + "/attempt_0";
  EXPECT_EQ(Slurp(attempt + "/filtered_stdout.log"),
            "a-12 r0/10> loss 1\na-12 r0/10> a,b\na-12 r1/11> loss 1\na-12 r1/11> a,b\n");
  EXPECT_EQ(Slurp(attempt + "/filtered_stderr.log"), "a-12 r0/10> warn 1\na-12 r1/11> warn 1\n");
  // Output that the filter of ranks keeps from the console is in its file all the same.
  EXPECT_EQ(Slurp(attempt + "/2/stdout.log"), "loss 1\nx\na,b");
}

TEST_F(PosixProcessSpawnerTest, AWorkerRunsOnItsCpus) {
  cpu_set_t ours;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(ours), &ours), 0);
  int last = CPU_SETSIZE - 1;
  while (CPU_ISSET(last, &ours) == 0) --last;
  PosixProcessSpawner::Options options;
  options.layout = Layout();
  options.output.redirects.all = kStdout;
  options.cpus = {{last}};
  Make(options);
  const char* script = "grep ^Cpus_allowed_list: /proc/self/status";
  ASSERT_TRUE(Shell(script).ok());
  Run();
  EXPECT_EQ(Slurp(options.layout.root() + "/attempt_0/0/stdout.log"),
            absl::StrCat("Cpus_allowed_list:\t", last, "\n"));
}

TEST_F(PosixProcessSpawnerTest, ASignalReachesTheWholeGroup) {
  Make();
  const pid_t pid = *Shell("trap 'exit 7' TERM; echo ready >&2; sleep 1000 & wait");
  loop_->AddTimer(absl::ZeroDuration(), [&] { spawner_->Signal(pid, SIGKILL); });
  Run();
  EXPECT_EQ(exits_[pid].signal, SIGKILL);
  spawner_->Signal(pid, SIGTERM);  // the worker has ended: no error
}

// A worker's child that has left its session, and the child of that child.
constexpr char kLeaveStrays[] =
    "setsid sh -c 'sleep 1000 & echo $$ $! > \"$0\"; : > \"$0.ready\"; wait' $1 & "
    "while [ ! -e $1.ready ]; do sleep 0.01; done; exit $2";

TEST_F(PosixProcessSpawnerTest, StraysDieAndLiveWorkersDoNot) {
  Make();
  const std::string note = ::testing::TempDir() + "/strays";
  ::unlink((note + ".ready").c_str());
  elastic::WorkerSpec spec;
  spec.argv = {"/bin/sh", "-c", kLeaveStrays, "sh", note, "3"};
  const pid_t leaver = *Spawn(spec);
  Run();
  EXPECT_EQ(exits_[leaver].exit_code, 3);
  const std::vector<std::string> pids = absl::StrSplit(Slurp(note), ' ');
  ASSERT_EQ(pids.size(), 2U);
  int stray = 0;
  ASSERT_TRUE(absl::SimpleAtoi(pids[0], &stray));
  ASSERT_EQ(::kill(stray, 0), 0) << "the stray should outlive its worker";

  const pid_t live = *Shell("sleep 1000");
  bool gone = false;
  spawner_->KillStrays([&] {
    gone = true;
    loop_->Stop();
  });
  while (!gone) RunLoop();
  for (const std::string& text : pids) {
    int pid = 0;
    ASSERT_TRUE(absl::SimpleAtoi(text, &pid));
    EXPECT_EQ(::kill(pid, 0), -1) << pid;
  }
  EXPECT_EQ(::kill(live, 0), 0);
  spawner_->Signal(live, SIGTERM);
  Run();
  EXPECT_EQ(exits_[live].signal, SIGTERM);
}

// The fake stands for a process that is stuck in the kernel and outlives SIGKILL; a test cannot
// make a real one.
TEST_F(PosixProcessSpawnerTest, TheLoopGoesOnWhileAStrayOutlivesSigkill) {
  bool stuck = true;
  PosixProcessSpawner::Options options;
  options.kill_children = [&](const std::set<pid_t>&) {
    return stuck ? KillPass{.found_any = true, .left = {4711}} : KillPass{};
  };
  Make(options);
  int gone_at = -1;
  Ticks ticks(loop_.get(), [&] { stuck = false; });
  spawner_->KillStrays([&] {
    gone_at = ticks.count();
    loop_->Stop();
  });
  RunLoop();
  EXPECT_EQ(gone_at, 20);
}

TEST_F(PosixProcessSpawnerTest, TheNextStartEndsTheHuntForStrays) {
  PosixProcessSpawner::Options options;
  int passes = 0;
  options.kill_children = [&](const std::set<pid_t>&) {
    ++passes;
    return KillPass{.found_any = true, .left = {4711}};
  };
  Make(options);
  spawner_->KillStrays([] { ADD_FAILURE() << "it is not gone"; });
  const pid_t pid = *Shell("exit 0");
  const int before = passes;
  Run();
  EXPECT_TRUE(exits_[pid].succeeded());
  EXPECT_EQ(passes, before);
}

TEST_F(PosixProcessSpawnerTest, TheSparedAreSpared) {
  const pid_t friendly = ::fork();
  if (friendly == 0) {
    while (true) ::pause();
  }
  Make();
  spawner_->Spare(friendly);
  spawner_->AwaitStrays();
  EXPECT_EQ(::kill(friendly, 0), 0);
  EXPECT_EQ(::waitpid(friendly, nullptr, WNOHANG), 0);
  ::kill(friendly, SIGKILL);
  ::waitpid(friendly, nullptr, 0);
}

TEST_F(PosixProcessSpawnerTest, AdoptedOrphansAreReaped) {
  Make();
  // A number is free again only when its orphan is reaped; the worker stays until then.
  const pid_t pid = *Shell(
      "orphan=$( (sleep 0.01 >/dev/null & echo $!) );"
      "while kill -0 $orphan 2>/dev/null; do sleep 0.01; done");
  Run();
  EXPECT_TRUE(exits_[pid].succeeded());
}

TEST_F(PosixProcessSpawnerTest, ADoomedSpawnerStartsNothing) {
  const std::atomic<bool> doomed = true;
  PosixProcessSpawner::Options options;
  options.doomed = &doomed;
  Make(options);
  EXPECT_FALSE(Shell("exit 0").ok());
}

// A worker that dies then was killed by us, and must not count as a failure of the job.
TEST_F(PosixProcessSpawnerTest, ADoomedSpawnerTellsNoEnd) {
  std::atomic<bool> doomed = false;
  PosixProcessSpawner::Options options;
  options.doomed = &doomed;
  Make(options);
  const pid_t pid = *Shell("sleep 1000");
  doomed = true;
  spawner_->Signal(pid, SIGKILL);
  // The end is seen once no process of the worker is left.
  const absl::Time deadline = MonotonicClock().Now() + kDeadline;
  const auto is_there = [pid] { return ::kill(pid, 0) == 0; };
  std::function<void()> look = [&] {
    if (!is_there() || MonotonicClock().Now() > deadline) return loop_->Stop();
    loop_->AddTimer(absl::Milliseconds(1), look);
  };
  loop_->AddTimer(absl::ZeroDuration(), look);
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_FALSE(is_there());
  EXPECT_FALSE(exits_.contains(pid));
}

TEST_F(PosixProcessSpawnerTest, TheDestructorLeavesNothing) {
  Make();
  const pid_t pid = *Shell("sleep 1000 & sleep 1000");
  spawner_.reset();
  EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

}  // namespace
}  // namespace ddp::launcher
