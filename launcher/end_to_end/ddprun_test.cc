// Tests of the real ddprun with its real Redis server and worker processes: what it starts, the
// workers' environment, their output, restarts, and messages about mistakes.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

std::string WriteFile(const std::string& path, const std::string& text, mode_t mode = 0644) {
  std::ofstream(path) << text;
  ::chmod(path.c_str(), mode);
  return path;
}

TEST(DdprunTest, VersionAndHelp) {
  DdprunDriver version({.arguments = {"--version"}});
  EXPECT_EQ(version.Wait(), 0);
  EXPECT_THAT(version.out(), StartsWith("ddprun "));
  DdprunDriver help({.arguments = {"--help"}});
  EXPECT_EQ(help.Wait(), 0);
  EXPECT_THAT(help.out(), AllOf(HasSubstr("--nproc-per-node"), HasSubstr("--shutdown-timeout")));
  EXPECT_EQ(help.err(), "");
}

TEST(DdprunTest, RunsEveryWorkerAndLeavesNothing) {
  DdprunDriver run(
      {.arguments = Shell({"--standalone", "--nproc-per-node=3"}, "echo worker $RANK")});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(Count(run.out(), "worker "), 3) << run.out();
  for (const char* line : {"worker 0\n", "worker 1\n", "worker 2\n"}) {
    EXPECT_THAT(run.out(), HasSubstr(line));
  }
  EXPECT_EQ(run.err(), "");
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

TEST(DdprunTest, TheWorkersEnvironment) {
  DdprunDriver run({.arguments = Shell({"--nproc-per-node=2", "--rdzv-id=my/run{1}%",
                                        "--role=trainer", "--max-restarts=4"},
                                       "if [ $RANK = 1 ]; then env; fi"),
                    .environment = {{"DDP_REDIS_PASSWORD", "not for a private server"}}});
  run.Wait();
  std::map<std::string, std::string> seen;
  const std::vector<std::string> lines = absl::StrSplit(run.out(), '\n');
  for (const std::string& line : lines) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) seen[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const std::map<std::string, std::string> expected = {
      {"LOCAL_RANK", "1"},
      {"RANK", "1"},
      {"GROUP_RANK", "0"},
      {"ROLE_RANK", "1"},
      {"ROLE_NAME", "trainer"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"WORLD_SIZE", "2"},
      {"GROUP_WORLD_SIZE", "1"},
      {"ROLE_WORLD_SIZE", "2"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "4"},
      {"TORCHELASTIC_RUN_ID", "my/run{1}%"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", "1"},
      {"DDP_GENERATION", "1"},
  };
  for (const auto& [name, value] : expected) EXPECT_EQ(seen[name], value) << name;
  EXPECT_GT(std::stoi(seen["MASTER_PORT"]), 0);
  EXPECT_THAT(seen["DDP_STORE"], AllOf(StartsWith("unix://"), HasSubstr("?prefix=")));
  EXPECT_THAT(seen["TORCHELASTIC_ERROR_FILE"], EndsWith("/attempt_0/1/error.json"));
  EXPECT_EQ(seen.count("DDP_REDIS_PASSWORD"), 0U);
}

TEST(DdprunTest, EveryRunWithoutAnIdHasAnIdOfItsOwn) {
  DdprunDriver first({.arguments = Shell({}, "echo id=$TORCHELASTIC_RUN_ID")});
  DdprunDriver second({.arguments = Shell({}, "echo id=$TORCHELASTIC_RUN_ID")});
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  EXPECT_NE(first.out(), second.out());
}

TEST(DdprunTest, PythonProgramsRunUnderTheInterpreter) {
  const Folder folder;
  // A stand-in for the interpreter, so that the test needs none.
  const std::string python = WriteFile(folder / "snake", "#!/bin/sh\necho ran \"$@\"\n", 0755);
  const std::string script = WriteFile(folder / "train.py", "");
  DdprunDriver run({.arguments = {"--", script, "--index=${local_rank}", "-x"},
                    .environment = {{"PYTHON_EXEC", python}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(run.out(), absl::StrCat("ran -u ", script, " --index=0 -x\n"));
  DdprunDriver module(
      {.arguments = {"-m", "pkg.train", "-m"}, .environment = {{"PYTHON_EXEC", python}}});
  EXPECT_EQ(module.Wait(), 0) << module.err();
  EXPECT_EQ(module.out(), "ran -u -m pkg.train -m\n");
}

TEST(DdprunTest, ARealPythonProgram) {
  if (std::filesystem::exists("/usr/bin/python3") == false) {
    GTEST_SKIP() << "no /usr/bin/python3";
  }
  const Folder folder;
  const std::string script = WriteFile(folder / "train.py",
                                       "import os, sys\n"
                                       "sys.exit(0 if os.environ['WORLD_SIZE'] == '2' and\n"
                                       "         sys.argv[1:] == ['--lr', '1'] else 4)\n");
  DdprunDriver run({.arguments = {"--nproc-per-node=2", script, "--lr", "1"},
                    .environment = {{"PYTHON_EXEC", "/usr/bin/python3"}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
}

TEST(DdprunTest, AFailureRestartsEveryRankInANewGeneration) {
  const Folder folder;
  // Rank 1 fails in its first two attempts after rank 0 has printed its line; rank 0 never ends by
  // itself.
  const std::string script =
      "echo rank=$RANK attempt=$TORCHELASTIC_RESTART_COUNT generation=$DDP_GENERATION "
      "store=$DDP_STORE;"
      "if [ $TORCHELASTIC_RESTART_COUNT = 2 ]; then exit 0; fi;"
      "if [ $RANK = 0 ]; then : > $TALK/$TORCHELASTIC_RESTART_COUNT; exec sleep 1000; fi;"
      "while [ ! -e $TALK/$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.01; done;"
      "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exit 3; else kill -KILL $$; fi";
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2", "--max-restarts=5", "--fault-grace-ms=50",
                           "--event-log-file=" + folder / "events"},
                          script),
       .environment = {{"TALK", folder.path()}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(run.err(),
            "restart 1 of 5: generation 2: rank 1 exited with code 3\n"
            "restart 2 of 5: generation 3: rank 1 was killed by SIGKILL\n");
  for (int rank : {0, 1}) {
    for (int attempt : {0, 1, 2}) {
      EXPECT_THAT(run.out(), HasSubstr(absl::StrCat("rank=", rank, " attempt=", attempt,
                                                    " generation=", attempt + 1, " ")));
    }
  }
  EXPECT_EQ(Count(run.out(), "rank="), 6);
  const std::string events = Slurp(folder / "events");
  EXPECT_EQ(Count(events, "\"event\":\"generation_started\""), 3);
  EXPECT_EQ(Count(events, "\"event\":\"restart\""), 2);
  EXPECT_EQ(Count(events, "\"event\":\"job_finished\""), 1);
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

TEST(DdprunTest, ASpentBudgetEndsInTheReport) {
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2", "--max-restarts=1"},
                          "[ $RANK = 1 ] && echo attempt && exit 7; exec sleep 1000")});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_EQ(Count(run.out(), "attempt\n"), 2);
  EXPECT_EQ(Count(run.err(), "restart 1 of 1: "), 1);
  EXPECT_THAT(run.err(), HasSubstr("\nsh FAILED\n"));
  const size_t root = run.err().find("Root Cause (first observed failure):\n[0]:\n");
  ASSERT_NE(root, std::string::npos) << run.err();
  EXPECT_THAT(run.err().substr(root),
              AllOf(HasSubstr("  rank      : 1 (local_rank: 1)\n"),
                    HasSubstr("  exitcode  : 7 (pid: "), HasSubstr("  error_file: <N/A>\n")));
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

TEST(DdprunTest, TheReportShowsWhatTheWorkerWrote) {
  const std::string json =
      R"({"message": {"message": "std::runtime_error: no data", "extraInfo":
         {"py_callstack": "at main", "timestamp": "1700000000"}}})";
  DdprunDriver run(
      {.arguments = Shell({}, "printf '%s' \"$JSON\" > $TORCHELASTIC_ERROR_FILE; exit 1"),
       .environment = {{"JSON", json}}});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), AllOf(HasSubstr("  traceback : std::runtime_error: no data\n"),
                               HasSubstr("at main\n"), HasSubstr("/attempt_0/0/error.json\n")));
  // The file that the report names exists for the user to read.
  const std::vector<std::string> entries = run.TemporaryEntries();
  EXPECT_THAT(entries, ElementsAre(StartsWith("ddprun_logs_")));
}

TEST(DdprunTest, AnErrorFileThatMakesNoSenseHarmsNothing) {
  DdprunDriver run(
      {.arguments = Shell({"--max-restarts=1"},
                          "head -c 3000000 /dev/urandom > $TORCHELASTIC_ERROR_FILE; exit 1")});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(),
              AllOf(HasSubstr("restart 1 of 1"), HasSubstr("the error file cannot be used"),
                    HasSubstr("larger than")));
}

TEST(DdprunTest, TeeLosesNoLineOfBusyRanks) {
  constexpr int kRanks = 6;
  constexpr int kLines = 20'000;
  const Folder folder;
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=6", "--tee=3", "--log-dir=" + folder.path()},
                          "seq -f \"$RANK out %.0f end\" 1 20000 & "
                          "seq -f \"$RANK err %.0f end\" 1 20000 >&2; wait; printf tail")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  const std::filesystem::path root = RunFolder(folder.path());
  for (const bool is_out : {true, false}) {
    std::vector<int> next(kRanks, 1);
    int tails = 0;
    const std::string& text = is_out ? run.out() : run.err();
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    for (const std::string& line : lines) {
      int prefix = -1;
      int rank = -1;
      int number = 0;
      int length = 0;
      const char* form = is_out ? "[default%d]:%d out %d end%n" : "[default%d]:%d err %d end%n";
      if (line.empty()) continue;
      if (line.size() >= 6 && line.substr(line.size() - 6) == "]:tail") {
        ++tails;
        continue;
      }
      ASSERT_EQ(std::sscanf(line.c_str(), form, &prefix, &rank, &number, &length), 3) << line;
      ASSERT_EQ(static_cast<size_t>(length), line.size()) << line;
      ASSERT_EQ(prefix, rank) << line;
      ASSERT_EQ(number, next.at(static_cast<size_t>(rank))++) << line;
    }
    EXPECT_THAT(next, ::testing::Each(kLines + 1));
    EXPECT_EQ(tails, is_out ? kRanks : 0);
  }
  EXPECT_EQ(Count(Slurp(root / "attempt_0/5/stdout.log"), " end\n"), kLines);
  EXPECT_THAT(Slurp(root / "attempt_0/5/stdout.log"), EndsWith("end\ntail"));
}

TEST(DdprunTest, RedirectsByLocalRankOfAnyLength) {
  const Folder folder;
  DdprunDriver run({.arguments = Shell({"--nproc-per-node=11", "-r", "0:1,10:3",
                                        "--log-dir=" + folder.path(), "--rdzv-id=a b/c"},
                                       "echo out $RANK; echo err $RANK >&2")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  const std::filesystem::path root = RunFolder(folder.path());
  EXPECT_THAT(root.filename().string(), StartsWith("a_b_c_"));
  EXPECT_EQ(Slurp(root / "attempt_0/0/stdout.log"), "out 0\n");
  EXPECT_EQ(Slurp(root / "attempt_0/10/stdout.log"), "out 10\n");
  EXPECT_EQ(Slurp(root / "attempt_0/10/stderr.log"), "err 10\n");
  EXPECT_FALSE(std::filesystem::exists(root / "attempt_0/1/stdout.log"));
  EXPECT_THAT(run.out(),
              AllOf(HasSubstr("out 1\n"), Not(HasSubstr("out 0")), Not(HasSubstr("out 10"))));
  EXPECT_THAT(run.err(), AllOf(HasSubstr("err 0\n"), Not(HasSubstr("err 10"))));
}

TEST(DdprunTest, EachAttemptHasFilesOfItsOwn) {
  const Folder folder;
  DdprunDriver run({.arguments = Shell({"-r3", "--max-restarts=1", "--log-dir=" + folder.path()},
                                       "echo $TORCHELASTIC_RESTART_COUNT; "
                                       "exit $((1 - TORCHELASTIC_RESTART_COUNT))")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  const std::filesystem::path root = RunFolder(folder.path());
  EXPECT_EQ(Slurp(root / "attempt_0/0/stdout.log"), "0\n");
  EXPECT_EQ(Slurp(root / "attempt_1/0/stdout.log"), "1\n");
}

TEST(DdprunTest, WithoutFilesThereIsNoErrorFile) {
  DdprunDriver run(
      {.arguments = Shell({"--log-dir=/dev/null", "-t1"}, "echo file=$TORCHELASTIC_ERROR_FILE.")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(run.out(), "[default0]:file=.\n");
}

TEST(DdprunTest, AClosedConsoleEndsNeitherTheJobNorTheFiles) {
  const Folder folder;
  int fds[2];
  ASSERT_EQ(::pipe2(fds, O_CLOEXEC), 0);
  UniqueFd read(fds[0]);
  const UniqueFd write(fds[1]);
  read.reset();  // closed as by `head`
  DdprunDriver run(
      {.arguments = Shell({"-t1", "--log-dir=" + folder.path()}, "seq 1 30000; echo ok"),
       .stdout_fd = write.get()});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(Slurp(RunFolder(folder.path()) / "attempt_0/0/stdout.log"), EndsWith("30000\nok\n"));
}

TEST(DdprunTest, ARedisServerOfTheUsersOwn) {
  const auto redis = ::ddp::testing::RedisFixture::StartTcp("secret");
  const std::string endpoint = absl::StrCat("127.0.0.1:", redis->endpoint().port);
  const std::vector<std::string> arguments =
      Shell({"--rdzv-endpoint", endpoint, "--rdzv-id=shared"}, "echo $DDP_STORE");
  DdprunDriver without({.arguments = arguments});
  EXPECT_EQ(without.Wait(), 1);
  EXPECT_THAT(without.err(), AllOf(HasSubstr(endpoint), HasSubstr("DDP_REDIS_PASSWORD"),
                                   Not(HasSubstr("secret"))));
  EXPECT_EQ(Count(without.err(), "\n"), 1) << without.err();
  EXPECT_THAT(without.TemporaryEntries(), IsEmpty());

  DdprunDriver with({.arguments = arguments, .environment = {{"DDP_REDIS_PASSWORD", "secret"}}});
  EXPECT_EQ(with.Wait(), 0) << with.err();
  EXPECT_THAT(with.out(), AllOf(StartsWith("redis://127.0.0.1:"), HasSubstr(":i1:g1."),
                                Not(HasSubstr("secret"))));
  // A second job with the same id is another instance, which knows nothing of the first.
  DdprunDriver again({.arguments = arguments, .environment = {{"DDP_REDIS_PASSWORD", "secret"}}});
  EXPECT_EQ(again.Wait(), 0) << again.err();
  EXPECT_THAT(again.out(), HasSubstr(":i2:g1."));
}

// The script does what torch.distributed.elastic.timer does. torchrun sends the signal to itself,
// too.
TEST(DdprunTest, AWorkerWhoseTimerRunsOutIsKilledAndTheJobGoesOn) {
  const char script[] = R"sh(
    set_timer() {
      echo "{\"version\": 1, \"pid\": $1, \"scope_id\": \"$2\", \"expiration_time\": $3," \
           "\"signal\": 9}" > $TORCHELASTIC_TIMER_FILE
    }
    set_timer $$ released 2e9
    set_timer $$ released -1
    set_timer $PPID agent 1
    if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit 0; fi
    if [ $RANK = 1 ]; then set_timer $$ load 1; fi
    while :; do sleep 0.05; done)sh";
  DdprunDriver run({.arguments = Shell({"--nproc-per-node=2", "--max-restarts=1"}, script),
                    .environment = {{"TORCHELASTIC_ENABLE_FILE_TIMER", "1"}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), HasSubstr("let its timer 'load' run out: sending SIGKILL\n"));
  EXPECT_THAT(run.err(),
              HasSubstr("restart 1 of 1: generation 2: rank 1 let its timer 'load' run out\n"));
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

// The timer of a data loader belongs to its worker.
TEST(DdprunTest, ATimerOfAChildEndsItsWorker) {
  const char script[] = R"sh(
    sh -c 'echo "{\"version\": 1, \"pid\": $$, \"scope_id\": \"s\", \"expiration_time\": 0," \
                "\"signal\": 15}" > $TORCHELASTIC_TIMER_FILE
           while :; do sleep 0.05; done'
    echo unreachable)sh";
  DdprunDriver run(
      {.arguments = Shell({}, script), .environment = {{"TORCHELASTIC_ENABLE_FILE_TIMER", "1"}}});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), HasSubstr("let its timer 's' run out: sending SIGTERM\n"));
  EXPECT_EQ(run.out(), "");
}

TEST(DdprunTest, TimersAreServedOnRequestOnly) {
  DdprunDriver run({.arguments = Shell({}, "echo file=$TORCHELASTIC_TIMER_FILE.")});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(run.out(), "file=.\n");
}

TEST(DdprunTest, TheMasterPortOfTheUser) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = absl::StrCat(ntohs(address.sin_port));
  DdprunDriver run({.arguments = Shell({"--master-port=" + port}, "echo started")});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), HasSubstr(port));
  EXPECT_EQ(Count(run.err(), "\n"), 1) << run.err();
  EXPECT_EQ(run.out(), "");
}

struct Mistake {
  std::vector<std::string> arguments;
  int exit_code;
  std::string text;
  std::map<std::string, std::string> environment = {};
};

TEST(DdprunTest, MistakesAreOneLineAndNothingHalfDone) {
  const std::vector<Mistake> mistakes = {
      {{}, 2, "no program to run"},
      {{"--standalone"}, 2, "no program to run"},
      {{"--nproc=2", "true"}, 2, "unknown flag --nproc; did you mean --nproc-per-node?"},
      {{"--frobnicate", "true"}, 2, "unknown flag --frobnicate"},
      {{"--nproc-per-node=lots", "true"}, 2, "--nproc-per-node=lots: expected a number"},
      {{"--nproc-per-node=0", "true"}, 2, "--nproc-per-node=0"},
      {{"--nproc-per-node", "gpu", "true"}, 2, "no GPU", {{"CUDA_VISIBLE_DEVICES", ""}}},
      {{"true"}, 2, "PET_NPROC_PER_NODE=x: expected a number", {{"PET_NPROC_PER_NODE", "x"}}},
      {{"true"}, 2, "PET_STANDALONE=yes: expected 0 or 1", {{"PET_STANDALONE", "yes"}}},
      {{"--nnodes=2", "true"}, 2, "where do the 2 nodes meet? Give all of them --rdzv-endpoint="},
      {{"--nnodes=1:2", "true"}, 2, "or each --node-rank=N and --master-addr=ADDRESS"},
      {{"--standalone", "--nnodes=2", "true"}, 2, "--standalone runs one node"},
      {{"--nnodes=2", "true"},
       2,
       "PET_STANDALONE runs one node, and --nnodes needs 2",
       {{"PET_STANDALONE", "1"}}},
      {{"--node-rank=1", "true"}, 2, "--node-rank=1: expected a rank from 0 to 0"},
      {{"--nproc-per-node=xpu", "true"}, 2, "--nproc-per-node=xpu: ddprun counts NVIDIA GPUs only"},
      {{"--rdzv-conf=protocol=x", "true"}, 2, "--rdzv-conf=protocol=x: unknown key protocol"},
      {{"--exit-code=x", "true"}, 2, "--exit-code=x: expected default, worker, reason"},
      {{"--signals-to-handle=SIGKILL", "true"}, 2, "--signals-to-handle=SIGKILL: expected names"},
      {{"--local-ranks-filter=a", "true"}, 2, "--local-ranks-filter=a: expected local ranks"},
      {{"--logs-specs=mine", "true"}, 2, "--logs-specs=mine: ddprun has no plug-ins"},
      {{"--start-method=x", "true"}, 2, "--start-method=x: expected spawn, fork, forkserver"},
      {{"true"},
       2,
       "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=-1: expected seconds",
       {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "-1"}}},
      {{"true"},
       2,
       "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT=-1: expected seconds",
       {{"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "-1"}}},
      {{"--virtual-local-rank", "true"},
       2,
       "CUDA_VISIBLE_DEVICES names 0",
       {{"CUDA_VISIBLE_DEVICES", ""}}},
      {{"--nnodes=a:b", "true"}, 2, "--nnodes=a:b: expected N or MIN:MAX"},
      {{"--max-restarts=-1", "true"}, 2, "--max-restarts=-1"},
      {{"--tee=0:9", "true"}, 2, "--tee=0:9: expected"},
      {{"--rdzv-backend=etcd", "true"}, 2, "--rdzv-backend=etcd: ddprun does not speak to etcd"},
      {{"--rdzv-endpoint=host:port", "true"}, 2, "--rdzv-endpoint"},
      {{"true"}, 2, "ddprun: PET_RDZV_ENDPOINT: ", {{"PET_RDZV_ENDPOINT", "host:port"}}},
      {{"--node-rank=0", "true"},
       2,
       "PET_MASTER_ADDR: 0.0.0.0 is an address of every machine",
       {{"PET_MASTER_ADDR", "0.0.0.0"}}},
      {{"--rdzv-backend=static", "--rdzv-endpoint=0.0.0.0:1", "true"},
       2,
       "--rdzv-endpoint: 0.0.0.0 is an address of every machine"},
      {{"--rdzv-endpoint=redis://u:hidden@h", "true"}, 2, "DDP_REDIS_PASSWORD"},
      {{"--no-python", "-m", "true"}, 2, "--no-python and -m contradict each other"},
      {{"./no-such-program"}, 1, "cannot run ./no-such-program: No such file or directory"},
      {{"no-such-program"}, 1, "cannot run no-such-program: no such program on PATH"},
      {{"no-such-script.py"}, 1, "cannot run no-such-script.py: No such file or directory"},
      {{"/etc/passwd"}, 1, "cannot run /etc/passwd: it is not executable"},
      {{"--log-dir=/proc/nowhere", "true"}, 1, "/proc/nowhere"},
      {{"--event-log-file=/proc/nowhere/x", "true"}, 1, "/proc/nowhere/x"},
  };
  for (const Mistake& mistake : mistakes) {
    DdprunDriver run({.arguments = mistake.arguments, .environment = mistake.environment});
    EXPECT_EQ(run.Wait(), mistake.exit_code) << mistake.text;
    EXPECT_THAT(run.err(), AllOf(StartsWith("ddprun: "), HasSubstr(mistake.text)));
    EXPECT_THAT(run.err(), Not(HasSubstr("hidden")));
    EXPECT_EQ(Count(run.err(), "\n"), 1) << run.err();
    EXPECT_EQ(run.out(), "") << mistake.text;
    EXPECT_THAT(run.TemporaryEntries(), IsEmpty()) << mistake.text;
  }
}

}  // namespace
}  // namespace ddp::launcher
