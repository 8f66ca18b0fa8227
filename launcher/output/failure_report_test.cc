#include "launcher/output/failure_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const ReportedFailure kFailure = {.rank = 5,
                                  .local_rank = 1,
                                  .pid = 77,
                                  .exit_code = 3,
                                  .host = "node7",
                                  .time = "2026-01-02_03:04:05",
                                  .error_file = "/logs/error.json",
                                  .text = "RuntimeError: no data\n  at line 1"};

TEST(FailureReportTest, OneFailure) {
  EXPECT_EQ(FormatFailureReport("./train", {kFailure}),
            R"(===================================
./train FAILED
-----------------------------------
Failures:
  <NO_OTHER_FAILURES>
-----------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : node7
  rank      : 5 (local_rank: 1)
  exitcode  : 3 (pid: 77)
  error_file: /logs/error.json
  traceback : RuntimeError: no data
                at line 1
===================================
)");
}

TEST(FailureReportTest, OtherFailuresStandAboveTheRootCause) {
  ReportedFailure other = kFailure;
  other.rank = 6;
  other.text = "Signal 15 (SIGTERM) received by PID 78";
  const std::string report = FormatFailureReport("./train", {kFailure, other});
  const size_t other_at = report.find("[1]:\n");
  const size_t root_at = report.find("[0]:\n");
  EXPECT_LT(report.find("Failures:\n"), other_at);
  EXPECT_LT(other_at, report.find("Root Cause (first observed failure):\n"));
  EXPECT_LT(report.find("Root Cause"), root_at);
  EXPECT_LT(root_at, report.find("rank      : 5"));
}

TEST(FailureReportTest, ARootCauseElsewhereIsNoneOfOurs) {
  const std::string report =
      FormatFailureReport("./train", {kFailure}, "on another node: rank 9 was killed by SIGKILL");
  const size_t root_at = report.find("Root Cause (first observed failure):\n");
  EXPECT_LT(report.find("[0]:\n"), root_at);
  EXPECT_THAT(report.substr(root_at),
              HasSubstr("  on another node: rank 9 was killed by SIGKILL\n="));
}

TEST(FailureReportTest, TheBorderIsAtMost60Wide) {
  ReportedFailure wide = kFailure;
  wide.text = std::string(200, 'x');
  EXPECT_EQ(FormatFailureReport("./train", {wide}).substr(0, 61), std::string(60, '=') + "\n");
}

elastic::WorkerFailure Failure(const std::string& error_file) {
  elastic::WorkerFailure failure;
  failure.rank = 1;
  failure.pid = 42;
  failure.status.exit_code = 3;
  failure.wall_time = absl::FromUnixSeconds(0);
  failure.error_file = error_file;
  return failure;
}

const ReportContext kContext = {.host = "here", .time_zone = absl::UTCTimeZone()};

TEST(DescribeFailureTest, WithoutAnErrorFile) {
  const ReportedFailure exited = DescribeFailure(Failure("/no/such/file"), kContext);
  EXPECT_EQ(exited.exit_code, 3);
  EXPECT_EQ(exited.error_file, "<N/A>");
  EXPECT_EQ(exited.time, "1970-01-01_00:00:00");
  EXPECT_THAT(exited.text, HasSubstr("exited with code 3"));
  elastic::WorkerFailure failure = Failure("");
  failure.status = {.exit_code = 0, .signal = SIGKILL, .error_file = ""};
  const ReportedFailure killed = DescribeFailure(failure, kContext);
  EXPECT_EQ(killed.exit_code, -9);
  EXPECT_EQ(killed.text, "Signal 9 (SIGKILL) received by PID 42");
  failure.status.cause = "out of memory: no more";
  EXPECT_EQ(DescribeFailure(failure, kContext).text,
            "Signal 9 (SIGKILL) received by PID 42, out of memory: no more");
}

TEST(DescribeFailureTest, TheStoppedAndTheHanging) {
  elastic::WorkerFailure failure = Failure("");
  failure.status = {.exit_code = 0, .signal = SIGTERM, .error_file = ""};
  failure.was_stopped = true;
  EXPECT_EQ(DescribeFailure(failure, kContext).text,
            "Signal 15 (SIGTERM) received by PID 42: stopped because of the root cause");
  failure = Failure("");
  failure.status = {.exit_code = 0, .signal = SIGKILL, .error_file = ""};
  failure.instead = "made no step for 42s";
  EXPECT_EQ(DescribeFailure(failure, kContext).text,
            "The worker made no step for 42s: told to end, it was killed by SIGKILL");
}

TEST(DescribeFailureTest, AHungWorkersOwnWordsStandBelowTheAgents) {
  const std::string path = ::testing::TempDir() + "/late_words.json";
  std::ofstream(path) << R"({"message": "KeyboardInterrupt", "timestamp": 60})";
  elastic::WorkerFailure failure = Failure(path);
  failure.instead = "made no step for 42s";
  EXPECT_EQ(DescribeFailure(failure, kContext).text,
            "The worker made no step for 42s: told to end, it exited with code 3\n"
            "KeyboardInterrupt");
}

TEST(DescribeCauseElsewhereTest, NamesTheHostOfAWorkerElsewhere) {
  elastic::JobResult result;
  result.end = elastic::JobEndReason::kWorkerFailed;
  EXPECT_EQ(DescribeCauseElsewhere(result), "");
  result.cause_elsewhere = "rank 9 exited with code 7";
  EXPECT_EQ(DescribeCauseElsewhere(result), "on another node: rank 9 exited with code 7");
  result.cause_host = "b-7";
  EXPECT_EQ(DescribeCauseElsewhere(result), "on another node (b-7): rank 9 exited with code 7");
  // Some ends of a job happen on no node.
  result.end = elastic::JobEndReason::kRendezvousTimeout;
  result.cause_elsewhere = "node b-7 was lost, and the job cannot restart: only 1 of 2 nodes came";
  EXPECT_EQ(DescribeCauseElsewhere(result), result.cause_elsewhere);
}

TEST(DescribeFailureTest, TheWorkersOwnWordsAndTime) {
  const std::string path = ::testing::TempDir() + "/words.json";
  std::ofstream(path) << R"({"message": {"message": "std::runtime_error: no data",
      "extraInfo": {"py_callstack": "#0 main", "timestamp": "60"}}})";
  const ReportedFailure failure = DescribeFailure(Failure(path), kContext);
  EXPECT_EQ(failure.error_file, path);
  EXPECT_EQ(failure.text, "std::runtime_error: no data\n#0 main");
  EXPECT_EQ(failure.time, "1970-01-01_00:01:00");
}

TEST(DescribeFailureTest, TheCallStackOfPythonWhereverTheFileHasIt) {
  const std::string path = ::testing::TempDir() + "/python.json";
  const auto text = [&](const std::string& json) {
    std::ofstream(path) << json;
    return DescribeFailure(Failure(path), kContext).text;
  };
  // torch.distributed.elastic's @record writes this form: the message stands in the stack.
  const std::string stack =
      "Traceback (most recent call last):\n  File \"train.py\", line 3, in main\nValueError: no "
      "data";
  const std::string json = nlohmann::json(stack + "\n").dump();
  EXPECT_EQ(text(R"({"message":{"message":"ValueError: no data","extraInfo":{"py_callstack":)" +
                 json + R"(,"timestamp":"60"}}})"),
            stack);
  EXPECT_EQ(text(R"({"message":{"message":"worker 3","extraInfo":{"py_callstack":)" + json + "}}}"),
            "worker 3\n" + stack);
  EXPECT_EQ(text(R"({"message":"worker 3","extraInfo":{"py_callstack":)" + json + "}}"),
            "worker 3\n" + stack);
  EXPECT_EQ(text(R"({"message":{"extraInfo":{"py_callstack":)" + json + "}}}"), stack);
  EXPECT_EQ(text(R"({"message":"m","extraInfo":{"py_callstack":["a\n","b", 3]}})"), "m\na\nb");
}

TEST(DescribeFailureTest, AFileThatMakesNoSenseIsReportedAsSuch) {
  const std::string path = ::testing::TempDir() + "/nonsense.json";
  std::ofstream(path) << "{{{";
  const ReportedFailure failure = DescribeFailure(Failure(path), kContext);
  EXPECT_EQ(failure.error_file, path);
  EXPECT_THAT(failure.text, AllOf(HasSubstr("The worker exited with code 3\n(the error file cannot "
                                            "be used: "),
                                  Not(HasSubstr("wrote no error file"))));
}

}  // namespace
}  // namespace ddp::launcher
