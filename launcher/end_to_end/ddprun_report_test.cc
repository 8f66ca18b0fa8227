// Tests of what the real ddprun reports of a failed job, on the node of the failure and on the
// others: the report, the root-cause file, the exit code.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/meeting/network_server.h"
#include "nlohmann/json.hpp"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

std::string ThisHost() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  EXPECT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  return name.data();
}

// Two nodes of two ranks each.
class TwoNodes {
 public:
  // Runs `setup` in each rank, then `script` when all four ranks are there.
  TwoNodes(const std::string& setup, const std::string& script) {
    const std::string port = absl::StrCat("--master-port=", *FreePort("127.0.0.1"));
    const std::string meet =
        "; : > $MEET/$RANK; for i in 0 1 2 3; do while ! [ -e $MEET/$i ]; do sleep 0.02; done; "
        "done; ";
    for (int node = 0; node < 2; ++node) {
      DdprunDriver::Options options;
      options.arguments =
          Shell({"--nnodes=2", "--nproc-per-node=2", absl::StrCat("--node-rank=", node),
                 "--master-addr=127.0.0.1", port, "--exit-code=worker"},
                absl::StrCat(setup, meet, script));
      options.environment = {{"MEET", folder_.path()},
                             {"TORCHELASTIC_ERROR_FILE", ErrorFile(node)}};
      nodes_.push_back(std::make_unique<DdprunDriver>(options));
    }
  }

  // Waits for the end of both nodes, which have the same code.
  void Wait(int code) {
    for (const auto& node : nodes_) EXPECT_EQ(node->Wait(), code) << node->err();
  }

  const std::string& err(int node) const { return nodes_.at(static_cast<size_t>(node))->err(); }

  // Returns the part under "Root Cause" of that node's report; OtherFailures() the part above it.
  std::string RootCause(int node) const { return Half(node, /*is_root=*/true); }
  std::string OtherFailures(int node) const { return Half(node, /*is_root=*/false); }

  nlohmann::json Written(int node) const {
    return nlohmann::json::parse(Slurp(ErrorFile(node)), nullptr, /*allow_exceptions=*/false);
  }

 private:
  std::string ErrorFile(int node) const { return folder_ / absl::StrCat("error", node, ".json"); }

  std::string Half(int node, bool is_root) const {
    const std::string title = "Root Cause (first observed failure):\n";
    const size_t failures = err(node).find("Failures:\n");
    const size_t root = err(node).find(title);
    EXPECT_LT(failures, root) << err(node);
    if (root == std::string::npos) return "";
    return is_root ? err(node).substr(root + title.size())
                   : err(node).substr(failures, root - failures);
  }

  Folder folder_;
  std::vector<std::unique_ptr<DdprunDriver>> nodes_;
};

std::string OnAnotherNode(const std::string& cause) {
  return absl::StrCat("  on another node (", ThisHost(), "): ", cause, "\n");
}

class StoppedWorkersTest : public ::testing::TestWithParam<std::pair<std::string, std::string>> {};

// Workers that were stopped did not fail, however they end.
TEST_P(StoppedWorkersTest, AreNoRootCauseOnAnyNode) {
  const auto& [reaction, code] = GetParam();
  TwoNodes job("[ $RANK = 0 ] || trap '" + reaction + "' TERM",
               "[ $RANK = 0 ] && exit 9; sleep 1000 & wait");
  job.Wait(9);
  EXPECT_THAT(job.RootCause(0), AllOf(HasSubstr("  rank      : 0 (local_rank: 0)\n"),
                                      HasSubstr("  exitcode  : 9 (pid: ")));
  EXPECT_EQ(Count(job.RootCause(1), OnAnotherNode("rank 0 exited with code 9")), 1)
      << job.RootCause(1);
  EXPECT_THAT(job.OtherFailures(1), AllOf(HasSubstr("  rank      : 2 (local_rank: 0)\n"),
                                          HasSubstr("  rank      : 3 (local_rank: 1)\n")));
  EXPECT_EQ(Count(job.OtherFailures(1), "  exitcode  : " + code + " (pid: "), 2)
      << job.OtherFailures(1);
  EXPECT_EQ(Count(job.OtherFailures(1), ": stopped because of the root cause\n"), 2)
      << job.OtherFailures(1);
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(job.Written(node)["message"]["errorCode"], 9) << node;
  }
}

INSTANTIATE_TEST_SUITE_P(Reactions, StoppedWorkersTest,
                         ::testing::Values(std::pair("exit 3", "3"),
                                           std::pair("kill -ABRT $$", "-6"),
                                           std::pair("trap - TERM; kill $$", "-15")));

TEST(DdprunReportTest, ANodeWhoseWorkersAllEndedWellTellsWhereTheJobFailed) {
  TwoNodes job("trap 'exit 0' TERM", "[ $RANK = 3 ] && exit 7; sleep 1000 & wait");
  job.Wait(7);
  EXPECT_THAT(job.OtherFailures(0), HasSubstr("<NO_OTHER_FAILURES>"));
  EXPECT_EQ(Count(job.RootCause(0), OnAnotherNode("rank 3 exited with code 7")), 1)
      << job.RootCause(0);
  EXPECT_EQ(job.Written(0)["message"]["errorCode"], 7);
  EXPECT_THAT(job.Written(0)["message"]["message"].get<std::string>(),
              HasSubstr("rank 3 exited with code 7"));
  EXPECT_THAT(job.RootCause(1), HasSubstr("  rank      : 3 (local_rank: 1)\n"));
}

TEST(DdprunReportTest, AHungWorkerIsOneFailureWithItsRealEnd) {
  DdprunDriver run({.arguments = {"--standalone", "--hang-timeout=1", "--exit-code=worker",
                                  "launcher/end_to_end/stepping_worker", "20", "/nonexistent"}});
  EXPECT_EQ(run.Wait(), 128 + SIGTERM) << run.err();
  EXPECT_THAT(run.err(),
              AllOf(HasSubstr("  <NO_OTHER_FAILURES>\n"), HasSubstr("  exitcode  : -15 (pid: "),
                    ContainsRegex("The worker made no step for .*: told to end, it was killed by "
                                  "SIGTERM\n"),
                    Not(HasSubstr("SIGKILL"))));
  EXPECT_THAT(run.err(),
              HasSubstr("it is ended as hung when it makes none for 1s (--hang-timeout"));
}

// A debugger and Ctrl-Z stop a worker for as long as somebody likes.
TEST(DdprunReportTest, AStoppedWorkerIsNotHung) {
  const Folder folder;
  std::vector<std::string> arguments =
      Shell({"--standalone", "--hang-timeout=1"},
            "(until [ -e $STOP ]; do sleep 0.02; done; kill -STOP $$; "
            "until [ -e $GO ]; do sleep 0.02; done; kill -CONT $$) & "
            "exec launcher/end_to_end/stepping_worker 20 $GO");
  DdprunDriver run({.arguments = std::move(arguments),
                    .environment = {{"STOP", folder / "stop"}, {"GO", folder / "go"}}});
  run.AwaitStdout("rank 0 is at step 20");
  std::ofstream(folder / "stop").put('x');
  run.AwaitStderr("is stopped by a signal (state T): it makes no step, and is not ended as hung");
  std::ofstream(folder / "go").put('x');
  EXPECT_EQ(run.Wait(), 0) << run.err();
}

// Returns a script that writes an error file as torch.distributed.elastic's @record does, for
// `rank`, which failed at `second`.
std::string WriteErrorFile(const std::string& rank, int second) {
  return absl::StrCat(
      "printf '{\"message\":{\"message\":\"ValueError: rank ", rank,
      "\",\"extraInfo\":{\"py_callstack\":\"Traceback (most recent call last):\\\\n  in main\\\\n",
      "ValueError: rank ", rank, "\",\"timestamp\":\"", second,
      "\"}}}' > $TORCHELASTIC_ERROR_FILE; ");
}

std::string StackOf(const std::string& rank) {
  const std::string margin(14, ' ');
  return absl::StrCat("  traceback : Traceback (most recent call last):\n", margin, "  in main\n",
                      margin, "ValueError: rank ", rank, "\n");
}

TEST(DdprunReportTest, OfTwoFailuresOfAHostTheEarlierErrorFileIsTheRootCause) {
  const Folder folder;
  // Rank 0 fails first and ends slowly; rank 1 waits for its error file, and ends at once.
  DdprunDriver run(
      {.arguments = Shell(
           {"--nproc-per-node=2", "--exit-code=worker"},
           absl::StrCat("if [ $RANK = 0 ]; then trap 'exit 4' TERM; ", WriteErrorFile("0", 1000),
                        ": > $MEET; sleep 1000 & wait; fi; while ! [ -e $MEET ]; do "
                        "sleep 0.02; done; ",
                        WriteErrorFile("1", 2000), "exit 3")),
       .environment = {{"MEET", folder / "meet"}, {"TORCHELASTIC_ERROR_FILE", folder / "e.json"}}});
  EXPECT_EQ(run.Wait(), 4) << run.err();
  const size_t root = run.err().find("Root Cause (first observed failure):\n");
  ASSERT_NE(root, std::string::npos) << run.err();
  EXPECT_THAT(run.err().substr(root),
              AllOf(HasSubstr("  rank      : 0 (local_rank: 0)\n"), HasSubstr(StackOf("0"))));
  EXPECT_THAT(run.err().substr(0, root),
              AllOf(HasSubstr("ddprun: rank 0 exited with code 4\n"),
                    HasSubstr("  rank      : 1 (local_rank: 1)\n"), HasSubstr(StackOf("1"))));
  const auto written = nlohmann::json::parse(Slurp(folder / "e.json"), nullptr, false);
  EXPECT_EQ(written["message"]["message"], "ValueError: rank 0") << written;
  EXPECT_EQ(written["message"]["errorCode"], 4) << written;
}

// Same as above, but ddprun's signal kills rank 0, and another node reports.
TEST(DdprunReportTest, AWorkerThatFailedBeforeItWasStoppedIsTheRootCauseOnAllNodes) {
  TwoNodes job(absl::StrCat("[ $RANK = 2 ] && { ", WriteErrorFile("2", 1000), "}"),
               absl::StrCat("if [ $RANK = 3 ]; then ", WriteErrorFile("3", 2000),
                            "exit 3; fi; exec sleep 1000"));
  job.Wait(128 + SIGTERM);
  EXPECT_THAT(job.RootCause(1),
              AllOf(HasSubstr("  rank      : 2 (local_rank: 0)\n"),
                    HasSubstr("The worker failed before the others, as its error file says: told "
                              "to end, it was killed by SIGTERM\n"),
                    HasSubstr("ValueError: rank 2\n")));
  EXPECT_THAT(job.OtherFailures(1), HasSubstr("  rank      : 3 (local_rank: 1)\n"));
  EXPECT_EQ(Count(job.RootCause(0),
                  OnAnotherNode("rank 2 failed before the others, as its error file says")),
            1)
      << job.RootCause(0);
}

TEST(DdprunReportTest, AnErrorFileThatCannotBeUsedIsNotOneThatIsMissing) {
  DdprunDriver run({.arguments = Shell({}, "echo '{{{' > $TORCHELASTIC_ERROR_FILE; exit 3")});
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), AllOf(HasSubstr("The worker exited with code 3\n"),
                               HasSubstr("(the error file cannot be used: "),
                               Not(HasSubstr("wrote no error file"))));
}

}  // namespace
}  // namespace ddp::launcher
