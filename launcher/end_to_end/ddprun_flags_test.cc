// Tests of the flags of the real ddprun as users see them: output, exit codes, signals, the
// workers' environment.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/meeting/network_server.h"
#include "launcher/process/cpu_topology.h"
#include "launcher/process/numa_plan.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

TEST(DdprunFlagsTest, OnlySomeLocalRanksReachTheConsole) {
  const Folder folder;
  DdprunDriver run({.arguments = Shell({"--nproc-per-node=3", "--local-ranks-filter=1", "-t",
                                        "1:1,2:1", "--log-dir=" + folder.path()},
                                       "echo out $RANK; echo err $RANK >&2")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(run.out(), "[default1]:out 1\n");
  EXPECT_EQ(run.err(), "err 1\n");
  const std::filesystem::path attempt = RunFolder(folder.path()) / "attempt_0";
  EXPECT_EQ(Slurp(attempt / "1/stdout.log"), "out 1\n");
  EXPECT_EQ(Slurp(attempt / "2/stdout.log"), "out 2\n");
  EXPECT_FALSE(std::filesystem::exists(attempt / "0/stdout.log"));
}

TEST(DdprunFlagsTest, PrefixesAndFilteredLines) {
  const Folder folder;
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2", "--tee=3", "--log-dir=" + folder.path(),
                           "--role=r", "--duplicate_stdout_filters=loss,a,,b",
                           "--log-line-prefix-template=${role_name}/${local_rank}/${rank}$$ "},
                          "echo loss $RANK; echo a; echo a,b; echo loss >&2")});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_THAT(Lines(run.out()), UnorderedElementsAre("r/0/0$ loss 0", "r/0/0$ a", "r/0/0$ a,b",
                                                     "r/1/1$ loss 1", "r/1/1$ a", "r/1/1$ a,b"));
  const std::filesystem::path attempt = RunFolder(folder.path()) / "attempt_0";
  EXPECT_THAT(Lines(Slurp(attempt / "filtered_stdout.log")),
              UnorderedElementsAre("r/0/0$ loss 0", "r/0/0$ a,b", "r/1/1$ loss 1", "r/1/1$ a,b"));
  EXPECT_FALSE(std::filesystem::exists(attempt / "filtered_stderr.log"));
  EXPECT_EQ(Slurp(attempt / "0/stdout.log"), "loss 0\na\na,b\n");
}

// The log folder is like --log-dir=/tmp, under the most open umask.
TEST(DdprunFlagsTest, NobodyElseCanWriteTheLogsOrLeadThemElsewhere) {
  const Folder folder;
  const std::string log_dir = folder / "shared";
  const std::string elsewhere = folder / "elsewhere";
  for (const std::string& path : {log_dir, elsewhere}) {
    ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
    ASSERT_EQ(::chmod(path.c_str(), 01777), 0);
  }
  const std::string root_cause = folder / "root_cause.json";
  const mode_t before = ::umask(0);
  // The worker puts a link where the next attempt's folder is to be, as another user could.
  DdprunDriver run(
      {.arguments = Shell({"--max-restarts=1", "--tee=3", "--duplicate-stdout-filters=secret",
                           "--log-dir=" + log_dir},
                          "echo secret; cd $(dirname $TORCHELASTIC_ERROR_FILE)/../..; "
                          "ln -s $ELSEWHERE attempt_1; exit 3"),
       .environment = {{"ELSEWHERE", elsewhere}, {"TORCHELASTIC_ERROR_FILE", root_cause}}});
  ::umask(before);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere));
  EXPECT_THAT(run.err(), HasSubstr("/attempt_1: a link or another file is in its place"));
  struct stat info {};
  ASSERT_EQ(::stat(root_cause.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0022, 0U);
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(log_dir)) {
    if (entry.is_symlink()) continue;
    ASSERT_EQ(::lstat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07022, 0U) << entry.path();
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 3) << "stdout.log, stderr.log, filtered_stdout.log";
}

TEST(DdprunFlagsTest, ThePrefixTemplateOfTheEnvironment) {
  DdprunDriver run({.arguments = Shell({"-t1", "--log-dir=/dev/null"}, "echo x"),
                    .environment = {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}> "}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(run.out(), "<0> x\n");
}

struct ExitCase {
  std::vector<std::string> flags;
  std::string script;
  int code;
};

TEST(DdprunFlagsTest, ExitCodes) {
  const std::vector<ExitCase> cases = {
      {{}, "exit 85", 1},
      {{}, "kill -SEGV $$", 1},
      {{"--exit-code=worker"}, "exit 85", 85},
      {{"--exit-code=worker", "--max-restarts=1"}, "exit 85", 85},
      {{"--exit-code=worker"}, "kill -KILL $$", 128 + SIGKILL},
      // Code of the root cause, not of the worker that was stopped because of it.
      {{"--exit-code=worker", "--nproc-per-node=2"}, "[ $RANK = 1 ] && exit 7; sleep 1000", 7},
      {{"--exit-code=worker"}, "exit 0", 0},
      {{"--exit-code=reason"}, "exit 85", 1},
      {{"--exit-code=reason", "--max-restarts=1"}, "exit 85", 13},
      {{"--exit-code=reason", "--log-dir=/proc/nowhere"}, "exit 0", 10},
      {{"--exit-code=reason", "./no-such-program"}, "", 10},
      {{"--exit-code=reason"}, "exit 0", 0},
  };
  for (const ExitCase& exit_case : cases) {
    DdprunDriver run({.arguments = Shell(exit_case.flags, exit_case.script)});
    EXPECT_EQ(run.Wait(), exit_case.code)
        << (exit_case.flags.empty() ? "" : exit_case.flags[0]) << ": " << exit_case.script << "\n"
        << run.err();
  }
}

TEST(DdprunFlagsTest, AStopByASignalHasACodeOfItsOwn) {
  DdprunDriver run({.arguments = Shell({"--exit-code=reason"}, "echo ready; exec sleep 1000")});
  run.AwaitStdout("ready");
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.Wait(), 15);
}

TEST(DdprunFlagsTest, SignalsOfTheUsersChoice) {
  DdprunDriver run(
      {.arguments = Shell({"--signals-to-handle=SIGTERM,SIGUSR1"},
                          "echo handles $TORCHELASTIC_SIGNALS_TO_HANDLE; trap 'echo got it; exit "
                          "0' USR1; echo ready; while :; do sleep 0.05; done")});
  run.AwaitStdout("ready");
  ::kill(run.pid(), SIGUSR1);
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.out(), AllOf(HasSubstr("handles SIGTERM,SIGUSR1\n"), HasSubstr("got it\n")));
  EXPECT_THAT(run.err(), HasSubstr("SIGUSR1"));
  EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
}

TEST(DdprunFlagsTest, AStubbornWorkerDoesNotDelayARestart) {
  // If the grace after a user's signal applied, the test would time out.
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=100000"},
                          "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; if [ $RANK = 1 ]; then "
                          "while :; do sleep 0.01; "
                          "[ -e $(dirname $(dirname $TORCHELASTIC_ERROR_FILE))/ready ] && exit 3; "
                          "done; fi; trap '' TERM; "
                          ": > $(dirname $(dirname $TORCHELASTIC_ERROR_FILE))/ready; "
                          "while :; do sleep 0.05; done")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), HasSubstr("restart 1 of 1: generation 2: rank 1 exited with code 3\n"));
}

TEST(DdprunFlagsTest, TheReportListsTheStoppedAfterTheRootCause) {
  // Rank 1 fails once the others run: a rank that was never started has nothing to report.
  DdprunDriver run(
      {.arguments = Shell({"--nproc-per-node=3"},
                          "started=$(dirname $(dirname $TORCHELASTIC_ERROR_FILE))/started; "
                          ": > $started.$RANK; [ $RANK = 1 ] || exec sleep 1000; "
                          "until [ -e $started.0 ] && [ -e $started.2 ]; do sleep 0.01; done; "
                          "exit 7")});
  EXPECT_EQ(run.Wait(), 1);
  const size_t failures = run.err().find("Failures:\n");
  const size_t root = run.err().find("Root Cause (first observed failure):\n[0]:\n");
  ASSERT_NE(failures, std::string::npos) << run.err();
  ASSERT_NE(root, std::string::npos) << run.err();
  const std::string others = run.err().substr(failures, root - failures);
  EXPECT_THAT(others,
              AllOf(HasSubstr("[1]:\n"), HasSubstr("[2]:\n"),
                    HasSubstr("  rank      : 0 (local_rank: 0)\n"),
                    HasSubstr("  rank      : 2 (local_rank: 2)\n"),
                    HasSubstr("  exitcode  : -15 (pid: "), HasSubstr("(SIGTERM) received by PID")));
  EXPECT_THAT(run.err().substr(root), HasSubstr("  rank      : 1 (local_rank: 1)\n"));
}

TEST(DdprunFlagsTest, WhoeverStartedDdprunGetsTheRootCauseInItsErrorFile) {
  const Folder folder;
  const std::string json =
      R"({"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "1700000000"}}})";
  DdprunDriver run(
      {.arguments = Shell({}, "printf '%s' \"$JSON\" > $TORCHELASTIC_ERROR_FILE; exit 9"),
       .environment = {{"JSON", json}, {"TORCHELASTIC_ERROR_FILE", folder / "error.json"}}});
  EXPECT_EQ(run.Wait(), 1);
  const auto written = nlohmann::json::parse(Slurp(folder / "error.json"), nullptr, false);
  ASSERT_TRUE(written.is_object()) << Slurp(folder / "error.json");
  EXPECT_EQ(written["message"]["message"], "ValueError: no");
  EXPECT_EQ(written["message"]["errorCode"], 9);
}

TEST(DdprunFlagsTest, AVirtualLocalRankHasOneDevice) {
  DdprunDriver run({.arguments = Shell({"--nproc-per-node=2", "--virtual-local-rank"},
                                       "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES"),
                    .environment = {{"CUDA_VISIBLE_DEVICES", "3,5"}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(Lines(run.out()), UnorderedElementsAre("0 0 3", "1 0 5"));
}

// Compares the CPUs that the workers report with the plan for this host.
TEST(DdprunFlagsTest, NumaBindingIsWhatTheWorkersHave) {
  const absl::StatusOr<CpuTopology> topology = ReadCpuTopologyOfThisHost();
  if (!topology.ok()) GTEST_SKIP() << topology.status();
  const auto plan = PlanNuma(*topology, NumaBinding::kExclusive, 2);
  if (!plan.ok()) GTEST_SKIP() << "too few cores for two workers: " << plan.status();
  DdprunDriver run({.arguments = Shell({"--numa-binding=exclusive", "--nproc-per-node=2"},
                                       "echo $LOCAL_RANK "
                                       "$(grep ^Cpus_allowed_list: /proc/self/status)")});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(run.err(), "");
  ASSERT_EQ(Lines(run.out()).size(), 2U) << run.out();
  for (const std::string& line : Lines(run.out())) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    ASSERT_EQ(words.size(), 3U) << line;
    EXPECT_EQ(words[1], "Cpus_allowed_list:");
    EXPECT_EQ(*ParseCpuList(words[2]), plan->at(words[0] == "0" ? 0 : 1)) << line;
  }
  // The plan is a proper subset of the CPUs, so the comparison has meaning.
  EXPECT_LT(plan->at(0).size(), topology->cpus.size());
}

TEST(DdprunFlagsTest, WhatAnOperatorOfClustersSets) {
  // Kubeflow sets these variables; the command line is bare.
  const int port = *FreePort("127.0.0.1");
  DdprunDriver run({.arguments = {"sh", "-c",
                                  "echo $RANK of $WORLD_SIZE, node $GROUP_RANK of "
                                  "$GROUP_WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"},
                    .environment = {{"PET_NNODES", "1"},
                                    {"PET_NPROC_PER_NODE", "2"},
                                    {"PET_NODE_RANK", "0"},
                                    {"PET_MASTER_ADDR", "127.0.0.1"},
                                    {"PET_MASTER_PORT", absl::StrCat(port)}}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(Lines(run.out()),
              UnorderedElementsAre(absl::StrCat("0 of 2, node 0 of 1 at 127.0.0.1:", port),
                                   absl::StrCat("1 of 2, node 0 of 1 at 127.0.0.1:", port)));
}

TEST(DdprunFlagsTest, NodesThatKnowNode0) {
  const std::string port = absl::StrCat("--master-port=", *FreePort("127.0.0.1"));
  const std::string script = "echo rank $RANK of $WORLD_SIZE on node $GROUP_RANK";
  const auto arguments = [&](const std::string& nproc, const std::string& node) {
    return Shell({"--nnodes=2", "--nproc-per-node=" + nproc, "--node-rank=" + node,
                  "--master-addr=127.0.0.1", port},
                 script);
  };
  // The node that waits for the other starts first.
  DdprunDriver second({.arguments = arguments("2", "1")});
  DdprunDriver first({.arguments = arguments("1", "0")});
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(second.Wait(), 0) << second.err();
  EXPECT_EQ(first.out(), "rank 0 of 3 on node 0\n");
  EXPECT_THAT(Lines(second.out()),
              UnorderedElementsAre("rank 1 of 3 on node 1", "rank 2 of 3 on node 1"));
}

TEST(DdprunFlagsTest, AllNodesEndWithTheSameCountAndTheRootCausesCode) {
  const std::string port = absl::StrCat("--master-port=", *FreePort("127.0.0.1"));
  const auto arguments = [&](const std::string& node) {
    return Shell({"--nnodes=2", "--node-rank=" + node, "--master-addr=127.0.0.1", port,
                  "--max-restarts=1", "--exit-code=worker"},
                 "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $RANK = 1 ] && exit 7; "
                 "exec sleep 1000");
  };
  DdprunDriver healthy({.arguments = arguments("0")});
  DdprunDriver failing({.arguments = arguments("1")});
  EXPECT_EQ(failing.Wait(), 7);
  EXPECT_EQ(healthy.Wait(), 7);
  EXPECT_EQ(failing.out(), "attempt 0\nattempt 1\n");
  for (const DdprunDriver* run : {&failing, &healthy}) {
    EXPECT_THAT(run->err(),
                AllOf(HasSubstr("restart 1 of 1: generation 2: rank 1 exited with code 7\n"),
                      HasSubstr("ddprun: rank 1 exited with code 7, and the budget of 1 restart is "
                                "spent\n")));
  }
}

// Groups the output "ID WORLD RANK" of several ddprun without an id by that id.
std::map<std::string, std::vector<std::string>> ByRunId(const std::vector<std::string>& lines) {
  std::map<std::string, std::vector<std::string>> jobs;
  for (const std::string& line : lines) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    if (parts.size() == 2) jobs[parts[0]].push_back(parts[1]);
  }
  return jobs;
}

TEST(DdprunFlagsTest, IdenticalJobsWithoutAnIdHaveIdsOfTheirOwn) {
  const auto redis = ::ddp::testing::RedisFixture::StartTcp();
  const DdprunDriver::Options options = {
      .arguments =
          Shell({"--nnodes=2", absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port)},
                "echo $TORCHELASTIC_RUN_ID $WORLD_SIZE $RANK")};
  std::vector<std::unique_ptr<DdprunDriver>> nodes;
  for (int i = 0; i < 6; ++i) nodes.push_back(std::make_unique<DdprunDriver>(options));
  std::string out;
  for (const auto& node : nodes) {
    EXPECT_EQ(node->Wait(), 0) << node->err();
    out += node->out();
  }
  const auto jobs = ByRunId(Lines(out));
  EXPECT_EQ(jobs.size(), 3u) << out;
  for (const auto& [id, ranks] : jobs) {
    EXPECT_THAT(ranks, UnorderedElementsAre("2 0", "2 1")) << id;
  }
}

TEST(DdprunFlagsTest, JobsOfOneNodeWithoutAnIdShareNothing) {
  const Folder folder;
  const std::string endpoint = absl::StrCat("--rdzv-endpoint=127.0.0.1:", *FreePort("127.0.0.1"));
  const DdprunDriver::Options options = {
      .arguments = Shell({"--nnodes=1", endpoint},
                         "echo $TORCHELASTIC_RUN_ID $WORLD_SIZE $RANK; echo up >&2; while [ ! -e " +
                             (folder / "go") + " ]; do sleep 0.01; done")};
  DdprunDriver first(options);
  DdprunDriver second(options);
  first.AwaitStderr("up");
  second.AwaitStderr("up");
  std::ofstream(folder / "go") << "go";
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(second.Wait(), 0) << second.err();
  const auto jobs = ByRunId(Lines(first.out() + second.out()));
  EXPECT_EQ(jobs.size(), 2u) << first.out() << second.out();
  for (const auto& [id, ranks] : jobs) EXPECT_THAT(ranks, UnorderedElementsAre("1 0")) << id;
  EXPECT_EQ(Count(first.err() + second.err(), "started Redis"), 0) << "a server of both";
}

TEST(DdprunFlagsTest, WhatMeansSomethingElseHereIsSaidOnce) {
  DdprunDriver run({.arguments = Shell({"--rdzv-backend=c10d", "--monitor-interval=5",
                                        "--rdzv-conf=store_type=file,last_call_timeout=1"},
                                       "echo $RANK")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(run.out(), "0\n");
  EXPECT_THAT(Lines(run.err()),
              UnorderedElementsAre(HasSubstr("--rdzv-backend=c10d"),
                                   HasSubstr("--monitor-interval"), HasSubstr("store_type")));
}

TEST(DdprunFlagsTest, APlaceThatIsNoneIsAUsageError) {
  for (const auto& [flag, why] : std::vector<std::pair<std::string, std::string>>{
           {"--rdzv-endpoint=a:b:c", "it has more than one ':' and is no IPv6 address"},
           {"--rdzv-endpoint=0.0.0.0:1234", "an address of every machine"},
           {"--rdzv-endpoint=[::]:1234", "an address of every machine"},
           {"--master-addr=0.0.0.0", "an address of every machine"}}) {
    DdprunDriver run({.arguments = Shell({"--nnodes=2", flag}, "exit 0")});
    EXPECT_EQ(run.Wait(), 2) << flag;
    EXPECT_THAT(run.err(), AllOf(HasSubstr(flag.substr(0, flag.find('='))), HasSubstr(why)));
    EXPECT_EQ(Lines(run.err()).size(), 1U) << run.err();
  }
}

TEST(DdprunFlagsTest, CompletionForShells) {
  DdprunDriver bash({.arguments = {"--print-completion", "bash"}});
  EXPECT_EQ(bash.Wait(), 0);
  EXPECT_THAT(bash.out(), HasSubstr("complete -o default -F _ddprun ddprun"));
  DdprunDriver zsh({.arguments = {"--print-completion=zsh"}});
  EXPECT_EQ(zsh.Wait(), 0);
  EXPECT_THAT(zsh.out(), StartsWith("#compdef ddprun\n"));
  DdprunDriver other({.arguments = {"--print-completion=fish"}});
  EXPECT_EQ(other.Wait(), 2);
  EXPECT_EQ(other.err(), "ddprun: --print-completion=fish: expected bash|zsh\n");
}

TEST(DdprunFlagsTest, EventsOnTheConsole) {
  DdprunDriver run({.arguments = Shell({"--event-log-handler=console"}, "exit 0")});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  for (const std::string& line : Lines(run.err())) {
    EXPECT_TRUE(nlohmann::json::parse(line, nullptr, false).is_object()) << line;
  }
  EXPECT_THAT(run.err(), AllOf(HasSubstr("job_finished"), Not(HasSubstr("ddprun: "))));
}

}  // namespace
}  // namespace ddp::launcher
