#include "launcher/output/root_cause_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

elastic::WorkerFailure Failure(int exit_code, int signal, const std::string& error_file) {
  elastic::WorkerFailure failure;
  failure.rank = 3;
  failure.pid = 42;
  failure.status.exit_code = exit_code;
  failure.status.signal = signal;
  failure.wall_time = absl::FromUnixSeconds(60);
  failure.error_file = error_file;
  return failure;
}

nlohmann::json Written(const elastic::WorkerFailure& failure) {
  const std::string path = ::testing::TempDir() + "/root_cause.json";
  const absl::Status status = WriteRootCauseFile(path, failure);
  EXPECT_TRUE(status.ok()) << status;
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
}

TEST(RootCauseFileTest, TheWorkersOwnWordsWithItsExitCode) {
  const std::string path = ::testing::TempDir() + "/worker.json";
  std::ofstream(path) << R"({"message": {"message": "RuntimeError: no data",
      "extraInfo": {"py_callstack": "at main", "timestamp": "1700000000"}}})";
  const nlohmann::json json = Written(Failure(85, 0, path));
  EXPECT_EQ(json, nlohmann::json::parse(R"({"message": {"message": "RuntimeError: no data",
      "errorCode": 85,
      "extraInfo": {"py_callstack": "at main", "timestamp": "1700000000"}}})"));
}

TEST(RootCauseFileTest, WhatTheAgentKnowsOfAWorkerThatSaidNothing) {
  const nlohmann::json json = Written(Failure(0, SIGKILL, "/no/such/file"));
  EXPECT_EQ(json["message"]["message"], "Signal 9 (SIGKILL) received by PID 42");
  EXPECT_EQ(json["message"]["errorCode"], -9);
  EXPECT_EQ(json["message"]["extraInfo"]["timestamp"], "60");
}

TEST(RootCauseFileTest, AnErrorFileThatMakesNoSenseIsNotCopied) {
  const std::string path = ::testing::TempDir() + "/nonsense.json";
  std::ofstream(path) << "{{{";
  const nlohmann::json json = Written(Failure(3, 0, path));
  EXPECT_EQ(json["message"]["errorCode"], 3);
  EXPECT_THAT(json["message"]["message"].get<std::string>(), HasSubstr("exited with code 3"));
}

TEST(RootCauseFileTest, AWorkerThatHungDoesNotKnowIt) {
  const std::string path = ::testing::TempDir() + "/late.json";
  std::ofstream(path) << R"({"message": "KeyboardInterrupt", "timestamp": 60})";
  elastic::WorkerFailure failure = Failure(0, SIGTERM, path);
  failure.instead = "made no step for 42s";
  EXPECT_EQ(Written(failure)["message"]["message"],
            "The worker made no step for 42s: told to end, it was killed by SIGTERM\n"
            "KeyboardInterrupt");
}

TEST(RootCauseFileTest, ARootCauseOnAnotherNode) {
  const std::string path = ::testing::TempDir() + "/elsewhere.json";
  ASSERT_TRUE(
      WriteRootCauseFile(path, "rank 9 exited with code 7", 7, absl::FromUnixSeconds(60)).ok());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const auto json = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(json["message"]["message"], "rank 9 exited with code 7");
  EXPECT_EQ(json["message"]["errorCode"], 7);
  EXPECT_EQ(json["message"]["extraInfo"]["timestamp"], "60");
}

TEST(RootCauseFileTest, AFileThatCannotBeWrittenIsNamed) {
  const absl::Status status = WriteRootCauseFile("/proc/nowhere/x", Failure(1, 0, ""));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("TORCHELASTIC_ERROR_FILE"), HasSubstr("/proc/nowhere/x")));
}

}  // namespace
}  // namespace ddp::launcher
