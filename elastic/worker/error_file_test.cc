#include "elastic/worker/error_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Bug : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs each test's body in a child process with its own error file. A process writes only its first
// error, and std::terminate ends the process.
class ErrorFileTest : public ::testing::Test {
 protected:
  struct Result {
    int wait_status = 0;
    std::string standard_error;
    std::string file;  // empty: none was written
  };

  Result RunChild(const std::function<int()>& body) {
    const std::string folder = ::testing::TempDir();
    const std::string path = absl::StrCat(folder, "/error.json");
    const std::string console = absl::StrCat(folder, "/stderr");
    unlink(path.c_str());
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("TORCHELASTIC_ERROR_FILE", path_override_.value_or(path).c_str(), 1);
      const int fd = open(console.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(fd, STDERR_FILENO);
      _exit(body());
    }
    Result result;
    EXPECT_EQ(waitpid(pid, &result.wait_status, 0), pid);
    result.standard_error = Contents(console);
    result.file = Contents(path);
    return result;
  }

  static std::string Contents(const std::string& path) {
    std::ifstream stream(path);
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }

  static std::string Message(const Result& result) {
    const nlohmann::json json = nlohmann::json::parse(result.file, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << result.file;
    if (json.is_discarded()) return "";
    int64_t seconds = 0;
    EXPECT_TRUE(
        absl::SimpleAtoi(json["message"]["extraInfo"]["timestamp"].get<std::string>(), &seconds));
    EXPECT_GT(seconds, 1'700'000'000);
    return json["message"]["message"];
  }

  std::optional<std::string> path_override_;
};

TEST_F(ErrorFileTest, BodysResultIsTheExitCodeAndNothingIsWritten) {
  const Result result = RunChild([] { return run_worker([] { return 7; }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 7);
  EXPECT_EQ(result.file, "");
}

TEST_F(ErrorFileTest, ExceptionIsReportedWithTypeAndText) {
  const Result result =
      RunChild([] { return run_worker([]() -> int { throw Bug("weights are gone"); }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(Message(result), HasSubstr("Bug: weights are gone"));
  EXPECT_THAT(result.standard_error, HasSubstr("Bug: weights are gone\n"));
}

TEST_F(ErrorFileTest, StackOfALibTorchErrorGoesToTheDetail) {
  const std::string what =
      "expected 3 channels,\nbut got 1\nException raised from forward at conv.cpp:12 (call first)\n"
      "frame #0: somewhere";
  const Result result =
      RunChild([&what] { return run_worker([&what]() -> int { throw Bug(what); }); });
  EXPECT_THAT(Message(result), HasSubstr("Bug: expected 3 channels, but got 1"));
  EXPECT_THAT(Message(result), Not(HasSubstr("frame")));
  EXPECT_THAT(result.file, HasSubstr("frame #0: somewhere"));
}

TEST_F(ErrorFileTest, ExceptionOnAnotherThreadIsReportedBeforeTheAbort) {
  const Result result = RunChild([] {
    return run_worker([] {
      std::thread([] { throw Bug("in the loader"); }).join();
      return 0;
    });
  });
  EXPECT_TRUE(WIFSIGNALED(result.wait_status));
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGABRT);
  EXPECT_THAT(Message(result), HasSubstr("Bug: in the loader"));
}

TEST_F(ErrorFileTest, TerminateWithoutExceptionIsReported) {
  const Result result = RunChild([]() -> int {
    install_terminate_handler();
    std::terminate();
  });
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGABRT);
  EXPECT_THAT(Message(result), HasSubstr("std::terminate"));
}

TEST_F(ErrorFileTest, FirstErrorWins) {
  const Result result = RunChild([] {
    write_error_file(std::make_exception_ptr(Bug("the cause")));
    return run_worker([]() -> int { throw Bug("a consequence"); });
  });
  EXPECT_THAT(Message(result), HasSubstr("the cause"));
  EXPECT_THAT(result.standard_error, HasSubstr("a consequence"));
}

TEST_F(ErrorFileTest, WhatIsNoStdExceptionIsNamedByItsType) {
  const Result result = RunChild([] { return run_worker([]() -> int { throw 42; }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(Message(result), HasSubstr("int: "));
}

TEST_F(ErrorFileTest, BytesThatAreNoTextStillMakeJson) {
  const Result result =
      RunChild([] { return run_worker([]() -> int { throw Bug("bad \xff\xfe name"); }); });
  EXPECT_THAT(Message(result), HasSubstr("name"));
}

TEST_F(ErrorFileTest, FileThatCannotBeWrittenCostsOneLine) {
  path_override_ = "/nonexistent/folder/error.json";
  const Result result = RunChild([] { return run_worker([]() -> int { throw Bug("x"); }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(result.standard_error,
              HasSubstr("cannot write the error file /nonexistent/folder/error.json"));
}

TEST_F(ErrorFileTest, NoVariableNoFile) {
  path_override_ = "";
  const Result result = RunChild([] { return run_worker([]() -> int { throw Bug("x"); }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(result.standard_error, Not(HasSubstr("cannot write")));
}

}  // namespace
}  // namespace ddp::elastic
